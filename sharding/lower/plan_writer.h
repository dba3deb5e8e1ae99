// The operations of a plan as lowering passes write them, moment by moment, each with its operands.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/sharding/lists.h"
#include "ebb/sharding/lower/operand_writer.h"
#include "ebb/sharding/lower/passes.h"

namespace ebb::sharding {

// The memory that the spans of a plan's operations point into.
struct PlanLists {
  Lists<Part> parts;
  Lists<Operand> operands;
  Lists<Move> moves;
  Lists<UpdateDetail> updates;

  void Close();
  int64_t bytes() const;
};

// An operation with lists that may still grow.
struct OperationDraft {
  OperationKind kind{};
  StreamId stream{};
  std::vector<Part> parts = {};
  int64_t bytes = 0;
  std::vector<Move> moves = {};
  Condition condition = Condition::kAlways;
  std::vector<UpdateDetail> updates = {};
};

class PlanWriter {
 public:
  explicit PlanWriter(const Plan& plan);

  void BeginMoment(Moment::Kind kind, int scope);
  // The operands of the next operation, in addition to those of its moves.
  OperandWriter& operands() { return operands_; }
  // Adds it to the newest moment; returns its index.
  int Issue(const OperationDraft& operation);
  // Notes the gather that serves the scope.
  void Gathers(int scope, int operation);

  // Moves all that was written into the plan.
  void Finish(Plan& plan) &&;

 private:
  OperandWriter operands_;
  std::vector<Operation> operations_;
  std::vector<Moment> moments_;
  std::shared_ptr<PlanLists> lists_ = std::make_shared<PlanLists>();
  std::vector<int> gather_of_scope_;
};

}  // namespace ebb::sharding
