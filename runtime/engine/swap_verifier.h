// Whether what is read of the swap files is what was written (ebb.verify_swap). A read hands over
// what came, a write what goes; a difference fails the engine. Streams call it in the order that
// the plan has; what lies in one place is never read and written at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/swap_checksums.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

class SwapVerifier {
 public:
  // All that is given but `files` outlives it. `verify` is not kAuto.
  SwapVerifier(sharding::SwapFiles files, std::span<const UnitSpec> units, VerifySwap verify,
               Storage& storage, StepErrors& errors);

  // The files of another plan, in which parameters, masters and states lie where they did. Between steps.
  void FollowPlan(sharding::SwapFiles files);

  // Before the first step of one that has begun with "all": only masters and states from now on.
  void VerifyStatesOnly();

  // Whether the files are still this run's: another program that truncates, replaces or links one changes
  // what is in it, and our own writes may make it as long again. Says no, and fails the engine, where not.
  bool FilesAreOurs();

  // Whether there are sums of a sub-group's arrays, in this order: its master or the low half of it, states.
  bool Verifies(int sub_group) const;
  // What an update has read. Says no, and fails the engine, where that is not what is known.
  // `states`: how many were read beside the master.
  bool AgreeStates(int sub_group, std::span<const uint64_t> checksums, int states);
  void SetStates(int sub_group, std::span<const uint64_t> checksums);
  // Of what is in the slot, in a pass of its own: where one update does not cover a sub-group, or does
  // not happen. Until the next call, and of one thread at a time, as is scratch().
  std::span<const uint64_t> SumStates(int sub_group, const std::byte* master,
                                      std::span<std::byte* const> states, ThreadTeam& team);
  // Of updates that sum what they read and write.
  std::span<uint64_t> scratch() { return scratch_; }

  // Updates sum what they read and write of masters and states. All else is summed where it is moved.
  static bool SumsWhenMoved(StateClass what);
  // `data`: what came of the file from `place` on, whole extents.
  void VerifyRead(const sharding::Place& place, std::span<const std::byte> data);
  // Masters that a gather shares with its unit's update. Whether they are what was written, the update finds
  // out before it writes back; where parameters are summed, too, so is what stands for them.
  void VerifyMasters(int sub_group, const std::byte* masters);
  // `data`: what goes into the file from `place` on. The sum of an extent that it holds a part of is not
  // known from then on.
  void NoteWrite(const sharding::Place& place, std::span<const std::byte> data);
  void Forget(const sharding::Place& place, int64_t bytes) { checksums_.Forget(place, bytes); }
  // An array of masters or states that an update has summed, and writes to its other place (SecondPlaces).
  void NoteMove(const sharding::Place& place);

  // What a save has of the disk, piece by piece, each from where the one before it ended.
  struct Pieces {
    sharding::Place next;
    bool from_start = false;  // of the extent that is summed
    optim::RunningChecksum sum;
  };
  // Of each extent that ends in the piece and that began in one of these. False where one differs, which has failed the
  // engine. Updates that are to come may have been summed, and not written.
  bool VerifyPiece(Pieces& pieces, const sharding::Place& place, std::span<const std::byte> data);

  // Reads `bytes` of a file from a place on and shows them.
  using Reader = absl::FunctionRef<absl::Status(const sharding::Place&, int64_t bytes,
                                                absl::FunctionRef<void(const std::byte*)>)>;
  // Of what lies in the file, which is read for it alone: ahead of reads in smaller pieces. False where
  // it differs, which has failed the engine.
  absl::StatusOr<bool> VerifyFile(const sharding::Place& place, int64_t bytes, Reader read);

 private:
  void FailAt(const SwapChecksums::Extent& extent, const sharding::Place& place);
  std::span<const sharding::SwapFiles::Array> ArraysOf(int sub_group) const {
    return files_.sub_groups[static_cast<size_t>(sub_group)];
  }

  sharding::SwapFiles files_;
  std::span<const UnitSpec> units_;
  VerifySwap verify_;
  Storage& storage_;
  StepErrors& errors_;
  SwapChecksums checksums_;
  std::vector<uint64_t> scratch_;
  std::vector<uint64_t> of_arrays_;  // of a sub-group
};

}  // namespace ebb
