// Standard headers come before the pragma: nothing of theirs may be compiled for instructions the machine may lack.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")

namespace jaxlm {
namespace {
#include "simd_avx2.h"
#include "numbers.inc.h"
#include "matvec.inc.h"
#include "attention.inc.h"
#include "flash.inc.h"
}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels table{"avx2", to_float, pack_x, matvec, nullptr, nullptr, nullptr, attend, attend_merge, attend_queries<FloatUnit>, read};
  return &table;
}
}  // namespace jaxlm
#else
const jaxlm::Kernels* jaxlm::avx2_kernels() { return nullptr; }
#endif
