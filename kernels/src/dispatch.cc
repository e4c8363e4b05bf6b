#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxlm {
namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
// The operating system keeps tiles for a process that asks for them.
bool runs_amx() {
#if defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
  constexpr int kRequest = 0x1023, kTileData = 18;
  return runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#else
bool runs_amx() { return false; }
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
#endif

bool allowed(const char* name) {
  const char* asked = std::getenv("JAXLM_CPU_ISA");
  return !asked || !*asked || !std::strcmp(asked, name);
}

const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  if (allowed("avx512") && runs_avx512() && avx512_kernels()) return *avx512_kernels();
  if (allowed("avx2") && runs_avx2() && avx2_kernels()) return *avx2_kernels();
  return *portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const MatrixUnit* matrix_unit() {
  static const MatrixUnit* chosen = kernels().matvec_int && allowed("amx") && runs_amx() ? amx_unit() : nullptr;
  return chosen;
}

}  // namespace jaxlm
