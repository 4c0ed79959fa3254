/* The work folder of a job: what the job is (job.json), and one record for everything that is finished: kept tensors,
 * each layer, the head. A record names the hashes of the tensors it wrote into the part files and of the hidden states
 * it left; resuming is: the record exists and the hashes match.
 *
 * Writing order: tensors, sync; hidden states, sync; record (atomic). Older hidden states go after that. */
#ifndef X3_JOB_STATE_H
#define X3_JOB_STATE_H

#include "formats/json.h"
#include "formats/pack_writer.h"

/* Writes job.json. */
x3_status x3_job_state_begin(const char *work, const cJSON *identity, x3_err *err) X3_MUST;
/* Removes job.json: the job is over. */
x3_status x3_job_state_end(const char *work, x3_err *err) X3_MUST;
bool x3_job_state_exists(const char *work);
/* Compares the identity with that in job.json; a difference is X3_ERR_INPUT and the message shows every key that differs,
 * then and now. Keys in `skipped` (NULL-terminated) may differ. */
x3_status x3_job_state_compare(const char *work, const cJSON *identity, const char *const *skipped, x3_err *err) X3_MUST;
/* The same of two identities: true when they are equal but for what is skipped. */
bool x3_job_state_equal(const cJSON *a, const cJSON *b, const char *const *skipped);

/* Record of a step ("scan", "kept", "layer-00003", "head"). *out is NULL when it is not there. */
x3_status x3_record_load(const char *work, const char *step, cJSON **out, x3_err *err) X3_MUST;
x3_status x3_record_save(const char *work, const char *step, const cJSON *record, x3_err *err) X3_MUST;

/* "tensors": {name: hash} of tensors [first, last) of the writer. */
x3_status x3_record_add_tensors(cJSON *record, const x3_pack_writer *w, const size_t *tensors, size_t n, x3_err *err) X3_MUST;
/* Accepts every tensor that the record names: reads it back and compares. */
x3_status x3_record_accept_tensors(const cJSON *record, x3_pack_writer *w, x3_err *err) X3_MUST;
/* A hash that x3_json_add_hash wrote. */
x3_status x3_record_hash(const cJSON *object, const char *key, const char *where, uint64_t *hash, x3_err *err) X3_MUST;

#endif
