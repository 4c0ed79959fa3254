/* What the two halves of opening a checkpoint share: headers (safetensors_header.c) and which shards there are and how
 * they agree with each other and with the index (safetensors_shards.c); and closing. Included by those, safetensors.c and
 * safetensors_map.c alone. */
#ifndef X3_SAFETENSORS_OPENING_H
#define X3_SAFETENSORS_OPENING_H

#include "formats/json.h"
#include "formats/safetensors.h"

#define X3_ST_INDEX_NAME "model.safetensors.index.json"

/* A tensor of a header. One with a finding keeps its name and shard only: the index is compared with it still. */
typedef struct x3_st_entry {
    x3_tensor t;
    bool is_valid;
} x3_st_entry;

/* A line of the index, borrowed from its JSON. file is NULL where the value is not a name. */
typedef struct x3_st_mapping {
    const char *tensor, *file;
} x3_st_mapping;

typedef struct x3_st_opening {
    x3_safetensors *st;
    x3_findings *findings;
    x3_st_entry *entries; /* of all shards */
    size_t n_entries, entries_capacity;
    bool *has_names; /* [n_shards]: its header could be parsed, so its names are known */
    cJSON *index;
    x3_st_mapping *mappings; /* sorted by tensor */
    size_t n_mappings;
} x3_st_opening;

/* Adds a finding about one tensor of a shard. */
void x3_st_tensor_problem(x3_st_opening *o, const x3_shard *shard, const char *tensor, const char *format, ...)
    X3_PRINTF(4, 5);
/* A problem of the content becomes a finding and the work goes on; anything else stops it. */
x3_status x3_st_content_or_stop(x3_st_opening *o, const x3_err *cause, x3_err *err) X3_MUST;

/* Fills st->dir and st->shards (names and paths, nothing opened) and the lines of the index. */
x3_status x3_st_find_shards(x3_st_opening *o, const char *path, x3_err *err) X3_MUST;
/* Opens shard i and adds its tensors to the entries. */
x3_status x3_st_open_shard(x3_st_opening *o, size_t i, x3_err *err) X3_MUST;
/* Names that stand in two shards, and the index against the entries, which are sorted. */
void x3_st_check_across(x3_st_opening *o);

/* Of a mapped shard; safetensors_map.c. */
void x3_st_unmap(x3_shard *shard);

#endif
