// Ranks that wait for each other for ever, because their programs have gone different ways: one
// opens a scope that the other leaves out, finishes an evaluation earlier, or drops a step alone.
//
//   rank 0   Forward 1 | Forward 2 | finish       waits in communicator 'reduce' for rank 1
//   rank 1   Forward 1 | Forward 2 | Forward 1    waits in communicator 'gather' for rank 0
//
// Neither communicator sees more than one of the ranks. So each rank keeps a log of the calls and
// scopes of its engines, and for each communicator how many collectives it has enqueued. A rank
// that has waited for a second publishes the ranks that it waits for, and compares: at once where
// ranks share memory, otherwise with what the other rank sends. Two are stopped only if both hold.
//
// 1. Their logs differ. An entry of the log has a place: the number of the engine's call among the
//    calls of the world since its Create, and its position in that call. It also has a hash of all
//    entries of the call up to it. Every rank has to make the same calls and open the same scopes
//    of an engine in the same order (engine.h), and the exchange of records makes any difference an
//    error of the call. So two entries of the same place with different hashes prove that the
//    ranks' programs differ. How far a rank has come proves nothing: one that loads data, compiles,
//    saves or lags behind on its streams has the same entries, only fewer. The log is of one
//    engine, because ranks may open scopes of two engines in different order. These are no
//    differences: calls that both ranks have dropped, where no exchange compares scopes; calls up
//    to the last error, which has told the ranks; and all calls while the ranks have had different
//    errors since they made the engine, because some ranks learn of one later than others. Scopes
//    after an evaluation that was dropped within a step have no entries, because their positions
//    may differ.
// 2. Each waits for the other in vain: for a collective that the other has not enqueued. Nothing
//    in its streams leads there. This alone proves nothing, because its thread may still enqueue
//    the collective. It lets ranks whose logs differ go on for as long as they can meet in the
//    exchange of records, where the difference is an error of one call and not of the engine. So a
//    rank may end its step early with an error, as Finish does after an exception, although the
//    others open more scopes.
//
// Ranks of a part (World::Split) have no log, because a part makes its calls in its own order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/call_kind.h"
#include "ebb/runtime/comm/packer.h"

namespace ebb {

// One rank's log, for the ranks that can read its memory. A zeroed log is empty.
struct alignas(64) RankLog {
  // The newest engines have a log, and of each the newest entries are kept.
  static constexpr int kEngines = 4, kLanes = 64;
  static constexpr uint64_t kKept = 512;
  struct Entry {
    std::atomic<uint64_t> place, what, hash;
  };
  struct Engine {
    std::atomic<uint32_t> number;   // 1 + the engine's
    std::atomic<uint32_t> errors;   // the rank's when it made the engine
    std::atomic<uint64_t> count;    // entries so far
    std::atomic<uint64_t> first;    // entries before it are not compared
    std::atomic<uint32_t> is_void;  // no entries until the engine's next call
    Entry entries[kKept];
  };
  // A communicator of this rank.
  struct Lane {
    std::atomic<uint64_t> id;        // the same on its ranks; 0: none
    std::atomic<uint64_t> enqueued;  // collectives
    std::atomic<uint64_t> waits;     // the collective in which this rank has waited for long, or 0
    std::atomic<uint64_t> absent;    // for these ranks of the world, modulo 64, by bit
  };
  std::atomic<uint32_t> errors;  // CallRecord::errors
  std::atomic<uint32_t> apart;   // 1 + a rank that was found to differ and to wait for this one
  Engine engines[kEngines];
  Lane lanes[kLanes];
};

class WaitCycles {
 public:
  struct What {
    CallKind kind = CallKind::kNone;
    int unit = -1;
    uint32_t scopes = 0;  // of the step or evaluation, with this one
  };
  // The Status for two ranks, the first with the lower number, and their first different entries.
  using Different = std::function<absl::Status(int engine, int first, const What& its, int second,
                                               const What& others)>;

  // `logs`: by rank of the world, null where this process cannot read that rank's memory. None: a
  // log of its own, and no other.
  WaitCycles(int rank, std::vector<RankLog*> logs, Different different);

  // The calling thread of an engine. `call`: the number of this rank's last call in the world.
  void AddEngine(int engine, uint64_t call);
  void Note(int engine, uint64_t call, What what);
  // A call has returned an error. Any thread.
  void NoteError(uint32_t errors);

  // The ranks for which that one has waited for a second, if this process can read its log and there
  // are at most 64. Any thread.
  std::vector<int> AwaitedBy(int rank) const;

  // For ranks that share no memory. Pack adds the newest entries and the waits. Receive compares
  // the log of `rank` with this one. Any thread.
  void Pack(Packer& packer) const;
  absl::Status Receive(int rank, Unpacker& unpacker) const;

  // A communicator of this rank.
  class Lane {
   public:
    // `id`: no other communicator of these ranks has it.
    Lane(WaitCycles& cycles, std::string_view id);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    // The enqueuing thread has enqueued this many collectives.
    void Enqueued(uint64_t collectives);
    // The thread that runs the operations. 0: the operation is none of all ranks.
    void Begin(uint64_t collective) { running_ = collective; }
    void End();
    // The operation waits for these ranks of the world. An error: it does so in vain.
    absl::Status Waits(std::span<const int> absent) { return WaitsIn(running_, absent); }
    absl::Status WaitsIn(uint64_t collective, std::span<const int> absent);

   private:
    WaitCycles& cycles_;
    RankLog::Lane* lane_ = nullptr;  // null: there is no room
    uint64_t running_ = 0;
    bool waits_ = false;
  };

 private:
  struct Entry {
    uint64_t place = 0, what = 0, hash = 0;
  };
  struct LaneState {
    uint64_t id = 0, enqueued = 0, waits = 0, absent = 0;
  };
  struct OfEngine {
    int number = -1;
    uint32_t errors = 0;              // since the rank has made it
    std::vector<Entry> entries = {};  // the oldest first
  };
  // A log as a rank has read or received it.
  struct Copy {
    uint32_t errors = 0;
    std::vector<OfEngine> engines;
    std::vector<LaneState> lanes;
  };
  // The calling thread's own notes of an engine.
  struct Writer {
    uint64_t call = 0, hash = 0;  // call: since the engine was made
    uint32_t position = 0;
    int depth = 0;            // an evaluation in a step: 2
    uint32_t scopes[3] = {};  // by depth
  };

  RankLog& Mine() const { return *logs_[rank_]; }
  static Copy Read(const RankLog& log, uint64_t newest);
  static std::vector<LaneState> ReadLanes(const RankLog& log);
  static bool WaitsInVain(std::span<const LaneState> lanes, int other,
                          std::span<const LaneState> of_other);
  absl::Status Compare(const Copy& mine, int other, const Copy& theirs) const;
  absl::Status LookAt(std::span<const int> absent);

  const int rank_;
  std::vector<RankLog*> logs_;
  const std::unique_ptr<RankLog> own_;
  const Different different_;
  Writer writers_[RankLog::kEngines];
  uint64_t made_at_[RankLog::kEngines] = {};  // the calls of this rank before those of the engine
  std::mutex lanes_mutex_;
};

}  // namespace ebb
