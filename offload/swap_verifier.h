// Checks that reads of a rank's swap files return the bytes that were written (ebb.verify_swap). If
// another program changes the files, or a disk returns wrong bytes, training ends. With "states"
// only masters and states have checksums, and parameters that are masters or halves of them.
//
// A step writes an extent (sharding/swap_files.h) in one go, and several extents at once. A
// smaller write from outside makes an extent unknown, until the whole extent is written, or
// read if it is not masters or states. A read hands over the bytes that came, a write those that
// go. Streams call it in the order of the plan, and no place is read and written at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/swap_storage.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

// By class, the bytes of a rank's files that have no checksum; with kOff all.
sharding::ClassBytes BytesWithoutChecksum(const sharding::SwapFiles& files, VerifySwap verify);
// For people: "gradients and activations", "" if all classes have checksums.
std::string ClassesWithoutChecksum(const sharding::SwapFiles& files, VerifySwap verify);

class SwapVerifier {
 public:
  // The files are new. `units` and `storage` outlive this. `verify` is not kAuto. `fail`: called
  // with the error of each difference, from any thread.
  SwapVerifier(sharding::SwapFiles files, std::span<const UnitSpec> units, VerifySwap verify,
               const SwapStorage& storage, std::function<void(absl::Status)> fail);
  ~SwapVerifier();

  // The files of another plan, in which parameters, masters and states lie where they did. Between
  // steps.
  void FollowPlan(sharding::SwapFiles files);

  // Before the first step of one that has begun with "all": only masters and states from now on.
  void VerifyStatesOnly();

  // Whether there are sums of a sub-group's arrays, in this order: its master or the low half of
  // it, states.
  bool Verifies(int sub_group) const;
  // Compares the sums of arrays that an update has read, from array `first` on: 0 with the master, 1
  // without. If one differs, the engine fails and the result is false.
  bool AgreeStates(int sub_group, int first, std::span<const uint64_t> checksums);
  void SetStates(int sub_group, int first, std::span<const uint64_t> checksums);
  // Sums the slot in a pass of its own, if no update or no single update covers the sub-group:
  // `arrays` are those from array `first` on. Until the next call, and of one thread at a time, as
  // is scratch().
  std::span<const uint64_t> SumStates(int sub_group, int first, std::span<std::byte* const> arrays,
                                      ThreadTeam& team);
  // For updates that sum the bytes that they read and write.
  std::span<uint64_t> scratch() { return scratch_; }

  // Updates sum the masters and states that they read and write. All else is summed where it is
  // moved.
  static bool SumsWhenMoved(StateClass what);
  // `data`: the bytes from `place` on, whole extents.
  void VerifyRead(const sharding::Place& place, std::span<const std::byte> data);
  // Masters that a gather shares with its unit's update. With "all" they are checked here, because
  // the gather uses a cast of them; otherwise the update checks them before it writes back.
  void VerifyMasters(int sub_group, const std::byte* masters);
  // `data`: the bytes that go into the file from `place` on. The sum of an extent that it holds a
  // part of is not known from then on.
  void NoteWrite(const sharding::Place& place, std::span<const std::byte> data);
  void Forget(const sharding::Place& place, int64_t bytes);
  // An array of masters or states that an update has summed, and writes to its other place.
  void NoteMove(const sharding::Place& place);

  // The bytes that a save reads from the disk, piece by piece, each from the end of the one before.
  struct Pieces {
    sharding::Place next;
    bool from_start = false;  // of the extent that is summed
    optim::RunningChecksum sum;
  };
  // Checks each extent that ends in this piece and began in an earlier one. If one differs, the
  // engine fails and the result is false. Later updates may have been summed already without being
  // written.
  bool VerifyPiece(Pieces& pieces, const sharding::Place& place, std::span<const std::byte> data);

  // Reads `bytes` of a file from a place on and shows them.
  using Reader = absl::FunctionRef<absl::Status(const sharding::Place&, int64_t bytes,
                                                absl::FunctionRef<void(const std::byte*)>)>;
  // Reads and checks bytes of the file for this purpose alone, ahead of reads in smaller pieces. If
  // they differ, the engine fails and the result is false.
  absl::StatusOr<bool> VerifyFile(const sharding::Place& place, int64_t bytes, Reader read);

 private:
  class Extent;

  // All extents that overlap `bytes` from `place` on; none if that is not verified.
  std::span<Extent> In(const sharding::Place& place, int64_t bytes);
  void FailAt(const Extent& extent, const sharding::Place& place);
  std::span<const sharding::SwapFiles::Array> ArraysOf(int sub_group) const {
    return files_.sub_groups[sub_group];
  }

  sharding::SwapFiles files_;
  std::span<const UnitSpec> units_;
  VerifySwap verify_;
  const SwapStorage& storage_;
  std::function<void(absl::Status)> fail_;
  std::vector<Extent> extents_;  // by file, then by offset
  std::vector<uint64_t> scratch_;
  std::vector<uint64_t> of_arrays_;  // of a sub-group
};

}  // namespace ebb
