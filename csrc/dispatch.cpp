// Which instruction sets the build has and the machine runs.

#include "core.hpp"

namespace distlion {

extern const Loops baseline_loops;

#if defined(__x86_64__)

extern const Loops avx2_loops;
extern const Loops avx512_loops;

std::size_t list_instruction_sets(InstructionSet (&found)[kMaxInstructionSets]) {
    __builtin_cpu_init();
    std::size_t n = 0;
    found[n++] = {"baseline", &baseline_loops};
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                          __builtin_cpu_supports("pclmul");
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

// On aarch64 the baseline has NEON.
std::size_t list_instruction_sets(InstructionSet (&found)[kMaxInstructionSets]) {
    found[0] = {"baseline", &baseline_loops};
    return 1;
}

#endif

}  // namespace distlion
