// The host's work around the exchanges of ranks, in the order of the reduce stream. At the end of a
// step or evaluation it is about records (exchange.h) and calls StepOutcome. Before LAMB and LARS
// it is about the norms of parameters (norm_exchange.h). The exchanges themselves are instructions
// as all others are.
#pragma once

#include <optional>
#include <vector>

#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/issue/linked_fragment.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/updates/norm_exchange.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class RecordExchange {
 public:
  struct Parts {  // borrowed
    const sharding::Plan* plan = nullptr;
    const Communicator *of_world = nullptr, *of_shards = nullptr;  // of records; of norms
    ControlBlock* control = nullptr;
    NormExchange* norms = nullptr;  // null: no optimizer takes norms
    const UpdateTable* table = nullptr;
    StepConstants* constants = nullptr;
    StepOutcome* outcome = nullptr;
    StepErrors* errors = nullptr;
    StepCommunicators* peers = nullptr;
    std::vector<Event>* concluded = nullptr;  // by parity
    bool reaches_device = false;  // the host reaches it, so the host looks for non-finite gradients
    int shard = 0;                // the number of this rank's slice of every unit
    bool own_enqueues = false;    // see UpdateCall
  };
  explicit RecordExchange(const Parts& parts) : with_(parts) {}

  // Begins a step; empty: the schedule's rate.
  void Begin(std::optional<double> learning_rate) { learning_rate_ = learning_rate; }

  // Enqueues the host's work of the instruction with this code.
  void Prepare(int parity, Stream& stream);
  void Seal(const LinkedFragment& run, int instruction, int parity, Stream& stream);
  void Conclude(int parity, Stream& stream);
  void SealNorms(const LinkedFragment& run, int instruction, int parity, Stream& stream);
  void ConcludeNorms(int parity, Stream& stream);

 private:
  void NameNonFinite(const LinkedFragment& run, int instruction, int parity) const;
  void SetTrustRatios(int parity);

  const Parts with_;
  std::optional<double> learning_rate_;
};

}  // namespace ebb
