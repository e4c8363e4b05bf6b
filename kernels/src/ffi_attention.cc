// The handler of attention: new tokens of each row against the stored keys and values and their own.
#include <algorithm>

#include "ffi_common.h"
#include "pool.h"

namespace jaxlm {
namespace {

constexpr int64_t kMinPart = 128;  // positions per task, at least

struct Part {
  int64_t b, p0, p1;
};

// Positions row b sees: the last S of its n, of those the ones that position n reaches.
std::vector<Part> split(const AttnJob& job, std::vector<int64_t>* first) {
  std::vector<Part> parts;
  const int64_t per_row = std::max<int64_t>(1, 4 * thread_count() / job.B);
  for (int64_t b = 0; b < job.B; ++b) {
    first->push_back(parts.size());
    const int64_t n = job.lengths[b], low = std::max(n - job.S, job.lowest(n)), count = n - low;
    if (count <= 0) continue;
    const int64_t tasks = std::clamp<int64_t>(count / kMinPart, 1, per_row), step = (count + tasks - 1) / tasks;
    for (int64_t p = low; p < n; p += step) parts.push_back({b, p, std::min(p + step, n)});
  }
  first->push_back(parts.size());
  return parts;
}

// A float array as float32, times a factor: itself when that changes nothing, else a copy in `out`.
const float* floats(const ffi::AnyBuffer& buffer, Type type, float factor, float* out) {
  const int64_t count = buffer.element_count();
  if (type == Type::kF32 && factor == 1) return static_cast<const float*>(buffer.untyped_data());
  kernels().to_float(type, buffer.untyped_data(), count, out);
  for (int64_t i = 0; i < count; ++i) out[i] *= factor;
  return out;
}

// One query per row: the positions are shared out, so that one long row keeps all threads busy.
void run_parts(const AttnJob& job) {
  std::vector<int64_t> first;
  const std::vector<Part> parts = split(job, &first);
  static thread_local Scratch memory;
  const int64_t size = part_floats(job);
  float* results = memory.get<float>(std::max<int64_t>(1, parts.size() * size));
  auto attend = [&](int64_t i) {
    static thread_local Scratch scratch;
    kernels().attend(job, parts[i].b, parts[i].p0, parts[i].p1, results + i * size, scratch.get<float>(scratch_floats(job)));
  };
  auto merge = [&](int64_t b) { kernels().attend_merge(job, b, results + first[b] * size, first[b + 1] - first[b]); };
  parallel_for(parts.size(), attend);
  for (int64_t b = 0; b < job.B; ++b) merge(b);
}

// Many queries per row: blocks of them are shared out, the longest ones first.
void run_blocks(ffi::ThreadPool& threads, const AttnJob& job) {
  const int64_t step = query_block(job), blocks = (job.T + step - 1) / step;
  const bool narrow = job.q_type == Type::kBF16 && job.new_type == Type::kBF16 && matrix_unit();
  auto attend = narrow ? matrix_unit()->attend_block : kernels().attend_block;
  auto task = [&](int64_t i) {
    static thread_local Scratch scratch;
    const int64_t t0 = (blocks - 1 - i / (job.B * job.K)) * step, row = i % (job.B * job.K);
    float* memory = scratch.get<float>(block_floats(job));
    attend(job, row / job.K, row % job.K, t0, std::min(t0 + step, job.T), memory);
  };
  const int64_t count = blocks * job.B * job.K;
  job.B * job.T <= kDecodeRows ? parallel_for(count, task) : on_xla_threads(threads, count, task);
}

// Checks every operand and fills in what the kernels read.
ffi::Error describe(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k_new, const ffi::AnyBuffer& v_new,
                    const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, int64_t layer, const Ints& lengths,
                    const Floats& sinks, AttnJob* job) {
  if (!float_type(q.element_type(), &job->q_type) || !float_type(k_new.element_type(), &job->new_type) ||
      k_new.element_type() != v_new.element_type())
    return invalid("q, k_new and v_new must be float32, bfloat16 or float16, the last two alike");
  if (!float_type(k.element_type(), &job->cache_type) || job->cache_type == Type::kF16 || k.element_type() != v.element_type())
    return invalid("the cache must be float32 or bfloat16");
  Stacked ks, vs;
  const int64_t bytes = type_bytes(job->cache_type);
  if (ffi::Error e = ks.init(k, 4, layer, bytes); e.failure()) return e;
  if (ffi::Error e = vs.init(v, 4, layer, bytes); e.failure()) return e;
  if (q.dimensions().size() != 4 || ks.dims != vs.dims) return invalid("q must be [B, T, H, h], k and v [.., B, S, K, h]");
  job->B = q.dimensions()[0], job->T = q.dimensions()[1], job->H = q.dimensions()[2], job->h = q.dimensions()[3];
  job->S = ks.dims[1], job->K = ks.dims[2];
  if (ks.dims[0] != job->B || ks.dims[3] != job->h) return invalid("q and the cache differ in rows or head width");
  if (job->K == 0 || job->H % job->K) return invalid("query heads must be a multiple of key heads");
  const auto news = {job->B, job->T, job->K, job->h};
  if (!dims_are(k_new, news) || !dims_are(v_new, news)) return invalid("k_new and v_new must be [B, T, K, h]");
  if (!dims_are(lengths, {job->B})) return invalid("lengths must be [B]");
  const int64_t sink_count = sinks.dimensions()[0];
  if (sink_count != 0 && sink_count != job->H) return invalid("sinks must be [H]");
  job->lengths = lengths.typed_data();
  job->sinks = sink_count ? sinks.typed_data() : nullptr;
  job->q_stored = q.untyped_data(), job->k_stored = k_new.untyped_data(), job->v_stored = v_new.untyped_data();
  job->k = ks.data, job->v = vs.data;
  for (int64_t b = 0; b < job->B; ++b) {
    if (job->lengths[b] < 0) return invalid("a row length is negative");
    if (job->S == 0 && job->lengths[b] > 0) return invalid("a row length is positive but the cache has no slots");
  }
  return ffi::Error::Success();
}

ffi::Error attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k_new, ffi::AnyBuffer v_new, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     Index layer, Ints lengths, Floats sinks, ffi::ResultBuffer<ffi::F32> out, float scale,
                     float softcap, int64_t window, int64_t chunk) {
  AttnJob job;
  if (ffi::Error e = describe(q, k_new, v_new, k, v, *layer.typed_data(), lengths, sinks, &job); e.failure()) return e;
  if (!dims_are(*out, {job.B, job.T, job.H, job.h})) return invalid("the result must be [B, T, H, h]");
  job.scale = scale, job.softcap = softcap, job.window = window, job.chunk = chunk;
  job.out = out->typed_data();
  if (job.B == 0 || job.T == 0) return ffi::Error::Success();
  if (job.T > 1) {
    run_blocks(threads, job);
    return ffi::Error::Success();
  }
  static thread_local Scratch q_memory, k_memory, v_memory;
  const int64_t room = job.B * job.H * job.h;
  job.q = floats(q, job.q_type, scale, q_memory.get<float>(room));
  job.k_new = floats(k_new, job.new_type, 1, k_memory.get<float>(room));
  job.v_new = floats(v_new, job.new_type, 1, v_memory.get<float>(room));
  run_parts(job);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlm

using namespace jaxlm;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlm_cpu_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Index>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk"));
