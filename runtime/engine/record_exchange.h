// Enqueues on the reduce stream what ranks tell each other: the records at the end of a step or evaluation (exchange.h),
// around which StepOutcome does its part, and before LAMB and LARS the norms of parameters (norm_exchange.h).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/norm_exchange.h"
#include "ebb/runtime/engine/step_communicators.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_outcome.h"
#include "ebb/runtime/engine/step_scalars.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/update_table.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class RecordExchange {
 public:
  struct Parts {  // borrowed
    const sharding::Plan* plan = nullptr;
    Stream* reduce = nullptr;
    Communicator *of_world = nullptr, *of_shards = nullptr;  // for records; for norms
    Storage* storage = nullptr;
    ControlBlock* control = nullptr;
    NormExchange* norms = nullptr;  // null: no optimizer takes norms
    const UpdateTable* table = nullptr;
    StepConstants* constants = nullptr;
    StepOutcome* outcome = nullptr;
    StepErrors* errors = nullptr;
    StepCommunicators* peers = nullptr;
    std::vector<Event>* concluded = nullptr;  // by parity
    bool reaches_device = false;  // the host does, so it looks for what is wrong in gradients
    int shard = 0;                // the number of this rank's slice of every unit
    bool own_enqueues = false;    // see UpdateCall
  };
  explicit RecordExchange(const Parts& parts) : with_(parts) {}

  // Begins a step; empty: the schedule's rate.
  void Begin(std::optional<double> learning_rate) { learning_rate_ = learning_rate; }

  // Codes kPrepare, kExchange and kExchangeNorms.
  void Prepare(int parity);
  void Exchange(int parity);
  void ExchangeNorms(int parity);
  // Behind kExchange: records the event that the caller waits for.
  void RecordConclusion(int parity);

 private:
  void NameNonFinite(int parity) const;
  std::span<optim::NormSums> SumsOn(bool device) const;
  void ConcludeNorms(int parity);

  const Parts with_;
  std::optional<double> learning_rate_;
  CollectiveSpan records_[ControlBlock::kSlots], norms_[2];  // by parity
};

}  // namespace ebb
