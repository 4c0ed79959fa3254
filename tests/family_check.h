/* A model folder with reference_logits.safetensors.ref against transformers, and against itself one token at a time. */
#ifndef X3_FAMILY_CHECK_H
#define X3_FAMILY_CHECK_H

#include "runtime/checkpoint.h"
#include "runtime/device/device.h"

/* ids of one sequence and logits [n_logits][vocab] at every `step`-th position. */
typedef struct reference {
    int32_t *ids;
    size_t n_ids, n_logits, vocab, step;
    float *logits;
} reference;

reference x3_test_reference(const char *file, const char *ids_name, const char *logits_name);
/* Of reference_logits.safetensors.ref in a model folder. */
reference x3_test_folder_reference(const char *dir);
void x3_test_reference_free(reference *r);

x3_checkpoint *x3_test_open_model(const char *dir);
x3_device *x3_test_open_threads(int n_threads);
x3_device *x3_test_open_device(void);
/* Logits of one streamed pass at every step-th position, n of them; malloc. */
float *x3_test_logits(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_ids, size_t step, size_t n);

/* Largest difference of a logit from the reference in the folder, checked against the bound. */
void x3_test_family_logits(const char *dir, double bound);
/* Feeds the reference's ids token by token, then cuts the cache back and feeds uneven pieces: every logit within bound of
 * the full pass. */
void x3_test_family_decoding(const char *dir, double bound);
void x3_test_family_decoding_on(x3_device *dev, const char *dir, double bound);

#endif
