// The handler of write: new keys or values take their slots in a cache, in place.
#include <cstring>

#include "ffi_common.h"
#include "pool.h"

namespace jaxlm {
namespace {

// float32 to bfloat16, to the nearest, ties to even; a NaN stays one.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

ffi::Error write(ffi::AnyBuffer cache, ffi::AnyBuffer fresh, Ints lengths, Ints counts, ffi::Result<ffi::AnyBuffer> out) {
  const Dims have = cache.dimensions(), more = fresh.dimensions();
  const bool wide = fresh.element_type() == ffi::F32;
  Type type;
  if (!float_type(cache.element_type(), &type)) return invalid("the cache must be float32, bfloat16 or float16");
  if (have.size() != 5 || more.size() != 5) return invalid("cache and new must be [R, B, S, K, h] and [R, B, T, K, h]");
  if (fresh.element_type() != cache.element_type() && !(wide && type == Type::kBF16))
    return invalid("new must have the cache's dtype, or be float32 for a bfloat16 one");
  const int64_t R = have[0], B = have[1], S = have[2], T = more[2], row = have[3] * have[4];
  if (more[0] != R || more[1] != B || more[3] != have[3] || more[4] != have[4]) return invalid("cache and new differ");
  if (!dims_are(lengths, {B}) || !dims_are(counts, {B})) return invalid("lengths and counts must be [B]");
  if (out->untyped_data() != cache.untyped_data()) std::memcpy(out->untyped_data(), cache.untyped_data(), cache.size_bytes());
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = lengths.typed_data()[b], count = counts.typed_data()[b];
    if (n < 0 || count < 0 || count > T) return invalid("a row length is negative, or a count outside 0 .. T");
    if (S == 0 && count > 0) return invalid("a count is positive but the cache has no slots");
  }
  const int64_t bytes = type_bytes(type) * row, from_bytes = (wide ? 4 : 2) * row;
  auto layer = [&](int64_t i) {
    const int64_t b = i % B, n = lengths.typed_data()[b], count = counts.typed_data()[b];
    char* slots = static_cast<char*>(out->untyped_data()) + i * S * bytes;
    const char* rows = static_cast<const char*>(fresh.untyped_data()) + i * T * from_bytes;
    for (int64_t t = count > S ? count - S : 0; t < count; ++t) {  // A ring drops what it would overwrite at once.
      char* slot = slots + (n + t) % S * bytes;
      if (bytes == from_bytes) std::memcpy(slot, rows + t * from_bytes, bytes);
      else for (int64_t j = 0; j < row; ++j) reinterpret_cast<uint16_t*>(slot)[j] = narrow(reinterpret_cast<const float*>(rows + t * from_bytes)[j]);
    }
  };
  if (T == 1) for (int64_t i = 0; i < R * B; ++i) layer(i);
  else parallel_for(R * B, layer);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlm

using namespace jaxlm;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlm_cpu_write, write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<ffi::AnyBuffer>());
