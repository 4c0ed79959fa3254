/* Which of the three codebooks of EXL3 a group uses, and the multipliers that mark them. C11 and CUDA C++ alike. */
#ifndef X3_CODEBOOK_KIND_H
#define X3_CODEBOOK_KIND_H

typedef enum x3_codebook { X3_CB_3INST = 0, X3_CB_MCG = 1, X3_CB_MUL1 = 2 } x3_codebook;

#define X3_MCG_MULTIPLIER 0xCBAC1FEDu
#define X3_MUL1_MULTIPLIER 0x83DCD12Du

#endif
