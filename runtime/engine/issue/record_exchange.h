// The host's work around the exchanges of ranks, in the order of the reduce stream. At the end of a
// step or evaluation it is about records (exchange.h) and calls StepOutcome. Before LAMB and LARS
// it is about the norms of parameters (norm_exchange.h). The exchanges themselves are operations
// as all others are.
#pragma once

#include <optional>

#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/updates/norm_exchange.h"
#include "ebb/runtime/engine/updates/update_call.h"
#include "ebb/runtime/engine/updates/update_table.h"

namespace ebb {

class Issuer;

class RecordExchange {
 public:
  // `norms`: null if no optimizer takes norms.
  RecordExchange(const Core& core, ControlBlock& control, const UpdateTable& table,
                 StepConstants& constants, StepOutcome& outcome, StepCommunicators& peers,
                 NormExchange* norms, const UpdateCall& update)
      : core_(core),
        control_(control),
        table_(table),
        constants_(constants),
        outcome_(outcome),
        peers_(peers),
        norms_(norms),
        update_(update) {}

  bool own_enqueues() const { return update_.own_enqueues(); }  // the trainer's optimizer
  // Begins a step; empty: the schedule's rate.
  void Begin(std::optional<double> learning_rate) { learning_rate_ = learning_rate; }

  // The tasks of the host by role. They call this object, which outlives the issuer.
  void GiveTasks(Issuer& issuer);

 private:
  void Prepare(int parity, Stream& stream);
  void Seal(const LinkedList& run, int op, int parity, Stream& stream);
  void Conclude(int parity, Stream& stream);
  void SealNorms(const LinkedList& run, int op, int parity, Stream& stream);
  void ConcludeNorms(int parity, Stream& stream);
  void NameNonFinite(const LinkedList& run, int op, int parity) const;
  void SetTrustRatios(int parity);

  const Core& core_;
  ControlBlock& control_;
  const UpdateTable& table_;
  StepConstants& constants_;
  StepOutcome& outcome_;
  StepCommunicators& peers_;
  NormExchange* const norms_;
  const UpdateCall& update_;
  std::optional<double> learning_rate_;
};

}  // namespace ebb
