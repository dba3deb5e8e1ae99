// Costs of a plan's operations on a machine that is described in figures. Memory and disk: the
// bytes of their operands. Collectives: the bytes that a rank receives. Bytes from its own host
// come over the link between devices. Rings go through each host once and there are as many as it
// has ranks of the group:
//
//   host 0            host 1             a rank of 4 that lie on 2 hosts receives half of its bytes
//     rank 0 == rank 1 == rank 2 == rank 3    from the network, the other half from its host
//
// Tensor ranks are neighbours, so the ranks of a host are fewer data ranks with as many tensor ranks
// each. The times of the trainer's kernels are an input.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/costs.h"

namespace ebb::sharding {

// One rank's share of the machine.
struct Machine {
  Amounts rates = {};  // a second; of kDevice: 1
  int ranks_per_host = 1;
  // The device's memory is the host's, its kernels run on the cores, and the caller computes.
  bool device_is_host = false;
  double core_bytes = 0;    // that a core reads and writes a second in copies and casts ...
  double sum_bytes = 0;     // ... in sums of gradients and their norms; 0: as many
  double update_bytes = 0;  // ... and in updates; 0: as many
  double products = 0;      // multiplications and additions a second, in products of matrices
  double half_side = 0;     // the smaller side of matrices whose products reach half of that
  // Latencies, in seconds.
  double issue = 0;            // of the caller, an operation
  double collective = 0;       // before bytes flow ...
  double collective_rank = 0;  // ... and for each rank that they go through
  double transfer = 0;         // until a disk answers
};

// Seconds of one visit's scope, all micro-batches of a round: when it runs alone, and the caller's
// to enqueue it. What the kernels exchange over the tensor ranks comes beside these seconds, because
// they wait for it: the plan has its bytes (Visit::forward_tensor_bytes), this the number of
// collectives.
struct KernelWork {
  double forward = 0, backward = 0;
  double caller_forward = 0, caller_backward = 0;
  double forward_collectives = 0, backward_collectives = 0;
};

class MachineCosts : public Costs {
 public:
  // `work`: by visit. The plan outlives this. Errors: a machine without a rank, cores that move
  // nothing, a length of `work` other than the number of visits.
  static absl::StatusOr<MachineCosts> Make(const Plan& plan, const Machine& machine,
                                           std::span<const KernelWork> work,
                                           bool caller_awaits_report);

  Cost Of(const Op& op) const override;
  Amounts rates() const override { return machine_.rates; }
  bool caller_computes() const override { return machine_.device_is_host; }
  bool caller_awaits_report() const override { return awaits_report_; }
  // The exchange over tensor ranks of kernels, with nothing else on its links.
  double ExchangeSeconds(const Op& kernels) const;

 private:
  MachineCosts(const Plan& plan, const Machine& machine, std::span<const KernelWork> work,
               bool caller_awaits_report)
      : plan_(plan),
        machine_(machine),
        work_(work.begin(), work.end()),
        awaits_report_(caller_awaits_report) {}
  struct Group {
    int ranks = 1, in_host = 1;
  };
  Group GroupOf(Axes axes) const;
  double AddMemory(const Op& op, Amounts& amounts) const;
  double BytesOfCore(const Op& op) const;
  void AddCollective(const Op& op, Cost& cost) const;
  void AddReceived(Group group, double bytes, Amounts& amounts) const;
  void AddKernels(const Op& op, Cost& cost) const;
  void AddIteration(const Op& op, Cost& cost) const;

  const Plan& plan_;
  const Machine machine_;
  const std::vector<KernelWork> work_;
  const bool awaits_report_;
};

}  // namespace ebb::sharding
