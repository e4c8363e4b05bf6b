#include <cstring>

#include "kernels.h"

namespace jaxlm {
namespace {
#include "simd_portable.h"
#include "matvec.inc.h"
#include "attention.inc.h"
}  // namespace

const Kernels* portable_kernels() {
  static const Kernels table{"portable", to_float, pack_x, matvec, nullptr, nullptr, nullptr, attend, attend_merge, read};
  return &table;
}
}  // namespace jaxlm
