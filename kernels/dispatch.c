/* Which kernel tables this processor runs. */
#include "kernels/kernels.h"

const x3_kernels *x3_kernels_find(x3_isa isa)
{
    switch (isa) {
    case X3_ISA_REF:
        return &x3_kernels_ref;
#if defined(__x86_64__)
    case X3_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &x3_kernels_avx2 : NULL;
    case X3_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")
                   ? &x3_kernels_avx512
                   : NULL;
    case X3_ISA_NEON:
#elif defined(__aarch64__)
    case X3_ISA_NEON:
        return &x3_kernels_neon;
    case X3_ISA_AVX2:
    case X3_ISA_AVX512:
#else
    case X3_ISA_AVX2:
    case X3_ISA_AVX512:
    case X3_ISA_NEON:
#endif
    case X3_N_ISAS:
        break;
    }
    return NULL;
}

const x3_kernels *x3_kernels_best(void)
{
    static const x3_isa order[] = {X3_ISA_AVX512, X3_ISA_AVX2, X3_ISA_NEON};

    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++)
        if (x3_kernels_find(order[i]) != NULL)
            return x3_kernels_find(order[i]);
    return &x3_kernels_ref;
}
