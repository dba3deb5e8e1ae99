// The trainer's kernels as operations. Between two moments they serve all scopes that are open.
#pragma once

#include <vector>

#include "ebb/sharding/lower/op_writer.h"

namespace ebb::sharding {

class ScopeLowering {
 public:
  ScopeLowering(const PassInputs& in, OpWriter& writer)
      : in_(in),
        d_(in.plan.decisions),
        table_(in.plan.table),
        writer_(writer),
        to_(writer.operands()) {}

  // A moment ends, which has opened or closed this scope; -1: none.
  void EndMoment(Moment::Kind kind, int scope);

 private:
  void Add(const PlannedScope& scope);
  void AddBoundary(int visit, bool gradient, Access access);

  const PassInputs& in_;
  const Decisions& d_;
  const Table& table_;
  OpWriter& writer_;
  OperandWriter& to_;
  std::vector<int> open_;  // scopes, as they opened
};

}  // namespace ebb::sharding
