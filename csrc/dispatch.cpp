// Which instruction sets the build has and the machine runs.

#include "core.hpp"

#if defined(DISTLION_HAS_AVX)
#include <cpuid.h>
#endif

namespace distlion {

extern const Loops baseline_loops;

#if defined(DISTLION_HAS_AVX)  // by the build

extern const Loops avx2_loops;
extern const Loops avx512_loops;

// Clang 15 does not know the name of this feature.
static bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

std::size_t list_instruction_sets(InstructionSet (&found)[kMaxInstructionSets]) {
    __builtin_cpu_init();
    std::size_t n = 0;
    found[n++] = {"baseline", &baseline_loops};
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul") && has_f16c();
    if (has_avx2) {
        found[n++] = {"avx2", &avx2_loops};
    }
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found[n++] = {"avx512", &avx512_loops};
    }
    return n;
}

#else

// The baseline of aarch64 has NEON.
std::size_t list_instruction_sets(InstructionSet (&found)[kMaxInstructionSets]) {
    found[0] = {"baseline", &baseline_loops};
    return 1;
}

#endif

}  // namespace distlion
