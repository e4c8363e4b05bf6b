#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace jaxlm {
namespace {
#include "simd_portable.h"
#include "numbers.inc.h"
#include "matvec.inc.h"
#include "attention.inc.h"
#include "flash.inc.h"
}  // namespace

const Kernels* portable_kernels() {
  static const Kernels table{"portable", to_float, pack_x, matvec, nullptr, nullptr, nullptr, attend, attend_merge, attend_queries<FloatUnit>, read};
  return &table;
}
}  // namespace jaxlm
