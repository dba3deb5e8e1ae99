// Where processes of one host meet to form new communicators: those of a world for NewCommunicator,
// those of a communicator for Split. Every rank joins the same rounds in the same order, reads what
// all propose and comes to the same groups; a group's first rank makes its memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/node/layout.h"
#include "ebb/runtime/comm/node/shared_file.h"

namespace ebb {

class NodeWorld;

namespace node {

class Board {
 public:
  // A rank's place in a new communicator.
  struct Place {
    CommunicatorOptions options;
    std::vector<int> world_ranks;
    int rank = 0;
    int64_t offset = 0;  // of the file
    GroupLayout layout{1, 1};
    Mapping memory;
  };

  // `failure`: of the ranks that meet; they form nothing any more then. `farewell`: of a rank, which
  // is then not waited for.
  Board(NodeWorld& world, std::vector<int> world_ranks, int rank, BoardSeat* seats,
        SharedStatus* broken, std::function<absl::Status()> failure,
        std::function<const Farewell*(int rank)> farewell);

  // Waits for all, at most as long as the proposed options say.
  absl::StatusOr<Place> Join(const Proposal& proposal);

 private:
  absl::Status AwaitAll(int64_t round, const CommunicatorOptions& options,
                        std::span<const int> ranks,
                        absl::FunctionRef<int64_t(const BoardSeat&)> rounds);
  void SayWaiting(const CommunicatorOptions& options, std::span<const int> ranks,
                  absl::FunctionRef<bool(int rank)> is_absent, double seconds);
  absl::StatusOr<int64_t> MakeMemory(const GroupLayout& layout, int ranks);
  absl::Status Break(const absl::Status& why);
  void Wake(std::span<const int> ranks);
  int NamedRank(int rank) const;

  NodeWorld& world_;
  const std::vector<int> world_ranks_;
  const int rank_;
  BoardSeat* const seats_;
  SharedStatus* const broken_;
  const std::function<absl::Status()> failure_;
  const std::function<const Farewell*(int rank)> farewell_;
};

// Writes and reads the one text of a farewell.
void SayFarewell(Farewell& farewell, const std::string& how);

}  // namespace node
}  // namespace ebb
