// Standard headers come before the pragma: nothing of theirs may be compiled for instructions the machine may lack.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")

namespace jaxlm {
namespace {
#include "simd_avx512.h"
#include "numbers.inc.h"
#include "matvec.inc.h"
#include "attention.inc.h"
#include "flash.inc.h"
#include "vnni.inc.h"
}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels plain{"avx512", to_float, pack_x, matvec, nullptr, nullptr, nullptr, attend, attend_merge, attend_queries<FloatUnit>, read};
  static const Kernels vnni{"avx512_vnni", to_float, pack_x,     matvec, quantized_bytes, quantize_x, matvec_int, attend, attend_merge, attend_queries<FloatUnit>, read};
  return __builtin_cpu_supports("avx512vnni") ? &vnni : &plain;
}
}  // namespace jaxlm
#else
const jaxlm::Kernels* jaxlm::avx512_kernels() { return nullptr; }
#endif
