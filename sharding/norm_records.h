// Optimizers that take norms (LAMB, LARS) need two sums of each parameter from all ranks that have a part of
// it, before any of it is updated. What a rank sends the others, in the order of units:
//
//   record   | header | unit 0: two sums of each parameter with a part in this rank's slice | unit 1 ... |
//
// A unit has as many entries as the slice with the most parameters needs, so that all records are of one size.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/partition.h"

namespace ebb::sharding {

struct Decisions;

// Bytes: of a record's header, of a parameter's entry, and of its sums while they are added up.
inline constexpr int64_t kNormHeaderBytes = 64, kNormEntryBytes = 160, kNormSumsBytes = 304;

struct NormRecords {
  std::vector<int> first;  // by unit: its first entry
  int entries = 0;
  // False: every rank adds up whole parameters itself.
  bool exchanged = false;
  // The most that a rank adds up: of its parameters, and one for each group that takes no norms.
  int sums = 0;

  int64_t bytes() const { return kNormHeaderBytes + entries * kNormEntryBytes; }
};

NormRecords LayOutNormRecords(const ModelLayout& layout, const Decisions& decisions);

// Which of its unit's entries a parameter has in the record of slice `slice`; -1: none of it is there.
int NormEntryOf(const Section& section, const Decisions& decisions, int slice,
                ParameterId parameter);

}  // namespace ebb::sharding
