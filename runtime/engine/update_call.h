// The update of one sub-group, and before LAMB and LARS the sums over its parameters, on the stream of where it
// runs: which rules with which options, from the table; whether it is to happen at all; an optimizer of the
// trainer's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/runtime/engine/norm_exchange.h"
#include "ebb/runtime/engine/optimizer_spec.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_outcome.h"
#include "ebb/runtime/engine/step_scalars.h"
#include "ebb/runtime/engine/step_tag.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/swap_verifier.h"
#include "ebb/runtime/engine/update_table.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class UpdateCall {
 public:
  struct Parts {                           // borrowed
    const sharding::Plan* plan = nullptr;  // what is the same in all of an engine's plans
    const ModelSpec* model = nullptr;
    const Config* config = nullptr;
    const OptimizerSpec* own = nullptr;  // of the trainer's; null: the config's
    const UpdateTable* table = nullptr;
    const StepConstants* constants = nullptr;
    const ControlBlock* control = nullptr;
    const StepOutcome* outcome = nullptr;
    StepErrors* errors = nullptr;
    SwapVerifier* verifier = nullptr;
    const Storage* storage = nullptr;
    const Device* device = nullptr;
    optim::Kernels* kernels = nullptr;
    optim::Kernels* host_kernels = nullptr;
    int shard = 0;  // which slice of every unit is this rank's
    // An optimizer of the trainer's enqueues on the device: the host has waited for what decides.
    bool own_enqueues = false;
  };
  explicit UpdateCall(const Parts& parts) : with_(parts) {}

  // kUpdate and kParameterNorms, whose operands are those of program.h.
  void Run(const LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) const;

 private:
  // Of one sub-group.
  struct Arrays {
    const sharding::SubGroup* group = nullptr;
    int parity = 0;
    bool early = false, passes_slot = false;
    std::byte *gradient = nullptr, *master = nullptr, *parameter = nullptr;
    std::span<std::byte* const> states = {};
  };
  // What of it one rule updates, and with which constants: those of the runs are counted from `first_set`.
  struct Part {
    optim::UpdateRule rule{};
    optim::UpdateArrays arrays;
    optim::UpdateRuns runs;
    int64_t first_set = 0;
  };

  optim::Kernels& KernelsOf(const Stream& stream) const {
    return stream.view().native == nullptr ? *with_.host_kernels : *with_.kernels;
  }
  const sharding::Decisions& decisions() const { return with_.plan->decisions; }
  void Update(const Arrays& of, Stream& stream) const;
  void Keep(const Arrays& of, Stream& stream) const;
  absl::Status UpdateByOwn(const Arrays& of, const StepScalars& scalars, Stream& stream) const;
  void SumNorms(const Arrays& of, std::span<optim::NormSums> sums, bool first,
                Stream& stream) const;
  void ForEachPart(const Arrays& of, const Stream& stream,
                   absl::FunctionRef<void(const Part&)> visit) const;
  optim::UpdateArrays ArraysOf(const Arrays& of) const;
  std::span<const uint64_t> Checksums(const Arrays& of, Stream& stream,
                                      std::optional<int> states = {}) const;
  bool UpdatesInOnePass(const sharding::SubGroup& group) const;
  const UpdateTable::Set& SetOf(const sharding::SubGroup& group) const;
  optim::RoundingPlace RoundingOf(int unit, int64_t at) const;

  const Parts with_;
};

}  // namespace ebb
