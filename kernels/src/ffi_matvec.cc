// The handlers of matvec, matvec_q8 and matvec_q4: one call computes any number of products of the same x.
#include <algorithm>

#include "ffi_common.h"
#include "pool.h"

namespace jaxlm {
namespace {

struct Call {
  Format format;          // kF32: the matrix's own float dtype decides
  int64_t group = 0;      // scale group; 0 for float weights
  size_t operands = 1;    // arrays per matrix
  bool int8 = false;
};

ffi::Error scales(const ffi::AnyBuffer& buffer, int64_t layer, int64_t group, MatJob* job, const void** out) {
  Type type;
  if (!float_type(buffer.element_type(), &type)) return invalid("scales must be float32, float16 or bfloat16");
  Stacked s;
  if (ffi::Error e = s.init(buffer, 2, layer, type_bytes(type)); e.failure()) return e;
  if (s.dims[0] != job->N || s.dims[1] * group != job->K) return invalid("scales must be [N, K / group]");
  if (out == &job->min && type != job->scale_type) return invalid("mins must have the dtype of scales");
  job->scale_type = type;
  *out = s.data;
  return ffi::Error::Success();
}

ffi::Error describe(const Call& call, ffi::RemainingArgs args, size_t first, int64_t layer, MatJob* job) {
  auto w = args.get<ffi::AnyBuffer>(first);
  if (w.has_error()) return w.error();
  job->format = call.format;
  int64_t item_bytes = 1, per_item = 1;
  if (call.format == Format::kQ8) {
    if (w->element_type() != ffi::S8) return invalid("8-bit values must be int8");
  } else if (call.format == Format::kQ4) {
    if (w->element_type() != ffi::U8) return invalid("packed 4-bit values must be uint8");
    per_item = 2;
  } else {
    Type type;
    if (!float_type(w->element_type(), &type)) return invalid("weights must be float32, bfloat16 or float16");
    job->format = static_cast<Format>(type);
    item_bytes = type_bytes(type);
  }
  Stacked s;
  if (ffi::Error e = s.init(*w, 2, layer, item_bytes); e.failure()) return e;
  job->w = s.data;
  job->N = s.dims[0];
  if (s.dims[1] * per_item != job->K) return invalid("x and weights differ in K");
  if (!call.group) return ffi::Error::Success();
  if (job->K % call.group) return invalid("K must be a multiple of the scale group");
  while (kBlock << job->group_shift < call.group) ++job->group_shift;
  for (size_t i = 1; i < call.operands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(first + i);
    if (buffer.has_error()) return buffer.error();
    if (ffi::Error e = scales(*buffer, layer, call.group, job, i == 1 ? &job->scale : &job->min); e.failure()) return e;
  }
  return ffi::Error::Success();
}

int64_t row_bytes(const MatJob& job) {
  const int64_t per_block = job.format == Format::kF32 ? 128 : job.format == Format::kQ8 ? 36 : job.format == Format::kQ4 ? 20 : 64;
  return std::max<int64_t>(1, job.K * per_block / kBlock);
}

// Rows of weights per task: enough bytes to be worth a hand-over, few enough that the threads finish together.
void run(const std::vector<MatJob>& jobs) {
  int64_t bytes = 0;
  for (const MatJob& job : jobs) bytes += job.N * row_bytes(job);
  const int64_t task_bytes = std::max<int64_t>(32 << 10, bytes / (8 * thread_count()) + 1);
  std::vector<int64_t> starts{0}, rows;
  for (const MatJob& job : jobs) {
    rows.push_back(std::max<int64_t>(1, task_bytes / row_bytes(job)));
    starts.push_back(starts.back() + (job.N + rows.back() - 1) / rows.back());
  }
  auto task = [&](int64_t i) {
    const size_t j = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
    const int64_t n0 = (i - starts[j]) * rows[j], n1 = std::min(n0 + rows[j], jobs[j].N);
    (jobs[j].xq ? kernels().matvec_int : kernels().matvec)(jobs[j], n0, n1);
  };
  parallel_for(starts.back(), task);
}

bool fits_tiles(const MatJob& job) {
  return job.B % kTileSide == 0 && job.N % kTileSide == 0 && job.K % kBlock == 0 && job.format != Format::kF32 &&
         job.format != Format::kF16;
}

// Many rows of bfloat16 on the matrix unit: two tiles of outputs per task.
void run_tiles(ffi::ThreadPool& threads, const std::vector<MatJob>& jobs) {
  constexpr int64_t kStep = 2 * kTileSide;
  std::vector<int64_t> starts{0};
  for (const MatJob& job : jobs) starts.push_back(starts.back() + (job.N + kStep - 1) / kStep);
  auto task = [&](int64_t i) {
    const size_t j = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
    const int64_t n0 = (i - starts[j]) * kStep;
    static thread_local Scratch scratch;
    matrix_unit()->matmul(jobs[j], n0, std::min(n0 + kStep, jobs[j].N), scratch.get<float>(jobs[j].B * kStep));
  };
  jobs[0].B <= kDecodeRows ? parallel_for(starts.back(), task) : on_xla_threads(threads, starts.back(), task);
}

// Where x has up to this many rows, three-byte integers are faster than float32 arithmetic.
int64_t int_rows_limit(Format format) { return format == Format::kQ4 ? 2 : 1; }

const float* floats(Type type, const void* x, int64_t count) {
  if (type == Type::kF32) return static_cast<const float*>(x);
  static thread_local Scratch memory;
  float* out = memory.get<float>(count);
  kernels().to_float(type, x, count, out);
  return out;
}

const float* pack(Format format, const float* x, int64_t B, int64_t K) {
  static thread_local Scratch memory;
  float* out = memory.get<float>(B * ((K + kBlock - 1) / kBlock * kBlock));
  kernels().pack_x(format, x, B, K, out);
  return out;
}

const QuantX* quantize(Format format, const float* x, int64_t B, int64_t K, int pieces) {
  static thread_local Scratch stream_memory, sums_memory;
  static thread_local QuantX out;
  char* stream = stream_memory.get<char>(kernels().quantized_bytes(format, B, K, pieces));
  float* sums = sums_memory.get<float>(B * (K / kBlock + 16));
  kernels().quantize_x(format, x, B, K, pieces, stream, sums);
  out = {pieces, stream, sums};
  return &out;
}

ffi::Error matvec(const Call& call, ffi::ThreadPool& threads, ffi::AnyBuffer x, Index layer, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  Type type;
  if (!float_type(x.element_type(), &type)) return invalid("x must be float32, bfloat16 or float16");
  if (x.dimensions().size() != 2) return invalid("x must be [B, K]");
  if (args.size() != rets.size() * call.operands || rets.size() == 0) return invalid("wrong number of operands");
  std::vector<MatJob> jobs(rets.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    MatJob& job = jobs[i];
    job.B = x.dimensions()[0];
    job.K = x.dimensions()[1];
    if (ffi::Error e = describe(call, args, i * call.operands, *layer.typed_data(), &job); e.failure()) return e;
    if (job.format != jobs[0].format) return invalid("matrices of one call must have one dtype");
    auto y = rets.get<ffi::AnyBuffer>(i);
    if (y.has_error()) return y.error();
    const auto result = (*y)->element_type();
    if ((result != ffi::F32 && result != ffi::BF16) || !dims_are(**y, {job.B, job.N}))
      return invalid("the result must be [B, N], float32 or bfloat16");
    if (result == ffi::F32) job.y = static_cast<float*>((*y)->untyped_data());
    else job.y16 = static_cast<uint16_t*>((*y)->untyped_data());
  }
  const MatJob& job = jobs[0];
  if (job.B == 0) return ffi::Error::Success();
  if (type == Type::kBF16 && job.B >= kTileSide && matrix_unit() && std::all_of(jobs.begin(), jobs.end(), fits_tiles)) {
    for (MatJob& j : jobs) j.x16 = static_cast<const uint16_t*>(x.untyped_data());
    run_tiles(threads, jobs);
    return ffi::Error::Success();
  }
  if (std::any_of(jobs.begin(), jobs.end(), [](const MatJob& j) { return j.y16; }))
    return invalid("only products on the matrix unit give bfloat16");
  const float* rows = floats(type, x.untyped_data(), job.B * job.K);
  const bool quantised = job.format == Format::kQ8 || job.format == Format::kQ4;
  if (quantised && kernels().matvec_int && (call.int8 || job.B <= int_rows_limit(job.format))) {
    const QuantX* xq = quantize(job.format, rows, job.B, job.K, call.int8 ? 1 : 3);
    for (MatJob& j : jobs) j.xq = xq;
  } else {
    const float* packed = pack(job.format, rows, job.B, job.K);
    for (MatJob& j : jobs) j.x = packed;
  }
  run(jobs);
  return ffi::Error::Success();
}

ffi::Error float_handler(ffi::ThreadPool threads, ffi::AnyBuffer x, Index layer, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return matvec({Format::kF32}, threads, x, layer, args, rets);
}

ffi::Error quant_handler(ffi::ThreadPool threads, ffi::AnyBuffer x, Index layer, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         int64_t bits, int64_t group, bool mins, bool int8) {
  if (group != 32 && group != 64 && group != 128 && group != 256) return invalid("group must be 32, 64, 128 or 256");
  if (bits != 4 && bits != 8) return invalid("bits must be 4 or 8");
  if (mins && bits == 8) return invalid("8-bit weights have no mins");
  return matvec({bits == 4 ? Format::kQ4 : Format::kQ8, group, mins ? 3u : 2u, int8}, threads, x, layer, args, rets);
}

}  // namespace
}  // namespace jaxlm

using namespace jaxlm;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlm_cpu_matvec, float_handler,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<Index>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlm_cpu_matvec_quant, quant_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Index>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group")
                                  .Attr<bool>("mins")
                                  .Attr<bool>("int8"));
