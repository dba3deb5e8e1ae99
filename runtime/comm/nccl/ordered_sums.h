// Reductions over NCCL with sums in the order of communicator.h, whatever NCCL's version and
// algorithm: ranks send each other the inputs, and one kernel of ours sums them.
//
//   rank 1's send   [ for 0 | for 1 | for 2 ]     a group of sends and receives, a piece at a time
//                         \      |      /
//   scratch         [ of 0  | of 1  | of 2  ]     every rank's input for rank 1's elements
//                             |
//   receive                [ sum ]                the kernel; of an all-reduce then sent to all
//
// A reduce-scatter moves the same bytes as NCCL's. A piece may hold parts of several small spans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/kernels/stream_mover.h"

namespace ebb {

class OrderedSums {
 public:
  // A send or a receive.
  struct Message {
    const std::byte* send = nullptr;
    std::byte* receive = nullptr;
    int64_t bytes = 0;
    int peer = 0;
  };
  // Enqueues them as one group.
  using Exchange = absl::FunctionRef<absl::Status(std::span<const Message>)>;

  // Whether a communicator of so many ranks may use it.
  static absl::Status CheckScratch(std::span<const std::byte> scratch, int size);

  // `scratch`: borrowed.
  OrderedSums(int rank, int size, int reduction_group, std::span<std::byte> scratch);

  absl::Status Run(const Collective& call, Exchange exchange, StreamMover& mover);

 private:
  // Consecutive elements of a span in one piece: of each rank's block of a reduce-scatter, or of an
  // all-reduced span, of which each rank sums a part.
  struct Cut {
    const CollectiveSpan* span = nullptr;
    int64_t begin = 0;  // elements
    int64_t count = 0;
    std::byte* scratch = nullptr;
  };
  struct Part {
    int64_t begin = 0;  // in the cut's send memory, in elements from the span's start
    int64_t count = 0;
  };

  // Puts the next piece into cuts_, from element `begin` of span `span` on, and moves both on.
  // False: the call is done.
  bool NextPiece(const Collective& call, size_t& span, int64_t& begin);
  Part PartOf(const Collective& call, const Cut& cut, int rank) const;
  // The bytes of one rank's inputs in the scratch.
  int64_t StrideOf(const Collective& call, const Cut& cut) const;
  std::byte* DestinationOf(const Collective& call, const Cut& cut) const;

  void SendInputs(const Collective& call);
  void Sum(const Collective& call, StreamMover& mover) const;
  void SendSums(const Collective& call);

  const int rank_;
  const int size_;
  const int reduction_group_;
  const std::span<std::byte> scratch_;
  std::vector<Cut> cuts_;  // of the piece; kept for its memory, like the messages
  std::vector<Message> messages_;
};

}  // namespace ebb
