// The handler of decode_attention: one query token per row against the stored keys and values and its own.
#include <algorithm>

#include "ffi_common.h"
#include "pool.h"

namespace jaxlm {
namespace {

constexpr int64_t kMinPart = 128;  // positions per task, at least

struct Part {
  int64_t b, p0, p1;
};

// Positions row b sees: the last S of its n, of those the ones the window reaches from position n.
std::vector<Part> split(const AttnJob& job, const int32_t* lengths, int64_t window, std::vector<int64_t>* first) {
  std::vector<Part> parts;
  const int64_t per_row = std::max<int64_t>(1, 4 * thread_count() / job.B);
  for (int64_t b = 0; b < job.B; ++b) {
    first->push_back(parts.size());
    const int64_t n = lengths[b];
    int64_t low = std::max<int64_t>(0, n - job.S);
    if (window > 0) low = std::max(low, n - window + 1);
    const int64_t count = n - low;
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

void run(const AttnJob& job, const std::vector<Part>& parts, const std::vector<int64_t>& first) {
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

ffi::Error attention(ffi::AnyBuffer q, ffi::AnyBuffer k_new, ffi::AnyBuffer v_new, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     Index layer, Ints lengths, Floats sinks,
                     ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, int64_t window) {
  AttnJob job;
  Type q_type, new_type;
  if (!float_type(q.element_type(), &q_type) || !float_type(k_new.element_type(), &new_type) ||
      k_new.element_type() != v_new.element_type())
    return invalid("q, k_new and v_new must be float32, bfloat16 or float16, the last two alike");
  if (!float_type(k.element_type(), &job.cache_type) || job.cache_type == Type::kF16 || k.element_type() != v.element_type())
    return invalid("the cache must be float32 or bfloat16");
  Stacked ks, vs;
  const int64_t bytes = type_bytes(job.cache_type);
  if (ffi::Error e = ks.init(k, 4, *layer.typed_data(), bytes); e.failure()) return e;
  if (ffi::Error e = vs.init(v, 4, *layer.typed_data(), bytes); e.failure()) return e;
  if (q.dimensions().size() != 3 || ks.dims != vs.dims) return invalid("q must be [B, H, h], k and v [.., B, S, K, h]");
  job.B = q.dimensions()[0], job.H = q.dimensions()[1], job.h = q.dimensions()[2];
  job.S = ks.dims[1], job.K = ks.dims[2];
  if (ks.dims[0] != job.B || ks.dims[3] != job.h) return invalid("q and the cache differ in rows or head width");
  if (job.K == 0 || job.H % job.K) return invalid("query heads must be a multiple of key heads");
  if (!dims_are(k_new, {job.B, job.K, job.h}) || !dims_are(v_new, {job.B, job.K, job.h})) return invalid("k_new and v_new must be [B, K, h]");
  if (!dims_are(lengths, {job.B}) || !dims_are(*out, {job.B, job.H, job.h})) return invalid("lengths must be [B], the result [B, H, h]");
  const int64_t sink_count = sinks.dimensions()[0];
  if (sink_count != 0 && sink_count != job.H) return invalid("sinks must be [H]");
  if (job.B == 0) return ffi::Error::Success();
  const int32_t* n = lengths.typed_data();
  if (*std::min_element(n, n + job.B) < 0) return invalid("a row length is negative");
  if (job.S == 0 && *std::max_element(n, n + job.B) > 0) return invalid("a row length is positive but the cache has no slots");

  static thread_local Scratch q_memory, k_memory, v_memory;
  const int64_t room = job.B * job.H * job.h;
  job.q = floats(q, q_type, scale, q_memory.get<float>(room));
  job.k_new = floats(k_new, new_type, 1, k_memory.get<float>(room));
  job.v_new = floats(v_new, new_type, 1, v_memory.get<float>(room));
  job.softcap = softcap;
  job.sinks = sink_count ? sinks.typed_data() : nullptr;
  job.k = ks.data, job.v = vs.data;
  job.out = out->typed_data();
  std::vector<int64_t> first;
  const std::vector<Part> parts = split(job, n, window, &first);
  run(job, parts, first);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlm

using namespace jaxlm;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlm_cpu_decode_attention, attention,
                              ffi::Ffi::Bind()
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
                                  .Attr<int64_t>("window"));
