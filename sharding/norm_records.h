// Optimizers that take norms (LAMB, LARS) need two sums of each parameter from all ranks with a
// part of it, before an update of any part. A rank's message to the others, in the order of units:
//
//   record   | header | unit 0: two sums of each parameter in this rank's slice | unit 1 ... |
//
// A unit has the entries of its slice with the most parameters, so that all records have one size.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

struct Decisions;

// Bytes of a record's header, of a parameter's entry, and of its sums while they are added up.
inline constexpr int64_t kNormHeaderBytes = 64, kNormEntryBytes = 160, kNormSumsBytes = 304;

struct NormRecords {
  std::vector<int> first;  // by unit: its first entry
  int entries = 0;
  // Ranks that exchange them, the tensor ranks of a slice side by side: those of a shard group, for
  // blocks of whole parameters times the tensor ranks. 1: every rank adds up whole parameters itself.
  int ranks = 1, tensor_ranks = 1;
  bool exchanged() const { return ranks > 1; }
  // The most sums of a rank: for each of its parameters, and for each group without norms.
  int sums = 0;

  int64_t bytes() const { return kNormHeaderBytes + entries * kNormEntryBytes; }
};

NormRecords LayOutNormRecords(const ModelLayout& layout, const Decisions& decisions);

// The entry of a parameter in its unit, in the record of slice `slice`; -1: no part is there. At
// stage 0 every slice's record is of the whole unit.
int NormEntryOf(const Section& section, const Decisions& decisions, int slice,
                ParameterId parameter);

}  // namespace ebb::sharding
