// One lane's part of one operation on a Conveyor: which elements go where in which step.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ebb/runtime/comm/node/conveyor.h"
#include "ebb/runtime/comm/node/pieces.h"
#include "ebb/runtime/comm/reduce.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {

class Conveyor::Pass {
 public:
  Pass(NodeGroup& group, Lane& lane, int number, const Collective& call, int64_t begin, int64_t end,
       WaitPoint::Deadline deadline)
      : group_(group),
        lane_(lane),
        number_(number),
        call_(call),
        deadline_(deadline),
        me_(group.rank()),
        size_(group.size()),
        element_(SizeOf(call.dtype)),
        begin_(begin),
        end_(end),
        staged_(call.spans),
        read_(call.spans),
        gathered_(call.spans) {
    const bool is_scattered = call.kind == CollectiveKind::kReduceScatter ||
                              call.kind == CollectiveKind::kAllToAll ||
                              call.kind == CollectiveKind::kAllReduce;
    const int64_t parts = is_scattered ? std::max(size_ - 1, 1) : 1;
    part_ = group.layout().slot_bytes() / parts / element_ / kElementsOfALine * kElementsOfALine;
    per_step_ = call.kind == CollectiveKind::kAllReduce ? part_ * size_ : part_;
    steps_ = (end - begin + per_step_ - 1) / per_step_;
    for (int ring = 0; ring < node::kRings; ++ring)
      base_[ring] = mine(ring).consumed.load(std::memory_order_relaxed);
    const int64_t blocks =
        call.kind == CollectiveKind::kAllGather || call.kind == CollectiveKind::kAllToAll ? size_
                                                                                          : 1;
    together_bytes_ = TotalBytes(call, blocks);
  }

  bool Run() {
    const bool reduces_all = call_.kind == CollectiveKind::kAllReduce;
    for (int64_t step = 0; step < steps_ + kAhead + (reduces_all ? 1 : 0); ++step) {
      if (step < steps_ && !Stage(step)) return false;
      const int64_t read = step - kAhead;
      if (read >= 0 && read < steps_ && !Read(read)) return false;
      if (reduces_all && read >= 1 && !Gather(read - 1)) return false;
    }
    // Ranks that stage or read nothing keep step with those that do.
    Finish(kReductionRing);
    if (reduces_all) Finish(kResultRing);
    return true;
  }

 private:
  static constexpr int64_t kAhead = node::kSlots / 2;  // steps from staging to reading
  static constexpr int64_t kElementsOfALine = 64;      // whole cache lines of any dtype
  static constexpr int kReductionRing = node::kReductionRing, kResultRing = node::kResultRing;

  static int64_t RoundUp(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
  static const std::byte* At(const void* base, int64_t bytes) {
    return static_cast<const std::byte*>(base) + bytes;
  }
  static std::byte* At(void* base, int64_t bytes) { return static_cast<std::byte*>(base) + bytes; }

  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t count() const { return end - begin; }
  };
  Range RangeOf(int64_t step) const {
    const int64_t begin = begin_ + step * per_step_;
    return {begin, std::min(end_, begin + per_step_)};
  }
  // The part of an all-reduced step that `rank` sums.
  Range PartOf(Range range, int rank) const {
    const int64_t part = RoundUp((range.count() + size_ - 1) / size_, 16);
    const int64_t begin = std::min(range.begin + rank * part, range.end);
    return {begin, std::min(begin + part, range.end)};
  }

  node::RingCounters& mine(int ring) { return group_.ring(me_, number_, ring); }
  std::byte* SlotOf(int rank, int ring, int64_t step) {
    return group_.slot(rank, number_, ring, base_[ring] + static_cast<uint64_t>(step));
  }
  // Where in `from`'s slot the elements for `to` begin.
  std::byte* PartFor(int from, int to, int64_t step) {
    const int64_t index = to < from ? to : to - 1;
    return At(SlotOf(from, kReductionRing, step), index * part_ * element_);
  }
  bool stages() const { return call_.kind != CollectiveKind::kBroadcast || call_.peer == me_; }

  // Until no rank reads any more what the slot of `step` held before.
  bool AwaitFree(int ring, int64_t step) {
    const uint64_t needed = base_[ring] + static_cast<uint64_t>(step) + 1;
    if (needed <= node::kSlots) return true;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == me_) continue;
      const std::atomic<uint64_t>& consumed = group_.ring(peer, number_, ring).consumed;
      if (!group_.AwaitRank(peer, call_, deadline_, lane_.spin, [&] {
            return consumed.load(std::memory_order_acquire) + node::kSlots >= needed;
          }))
        return false;
    }
    return true;
  }
  bool AwaitStaged(int peer, int ring, int64_t step) {
    const std::atomic<uint64_t>& written = group_.ring(peer, number_, ring).written;
    const uint64_t needed = base_[ring] + static_cast<uint64_t>(step) + 1;
    return group_.AwaitRank(peer, call_, deadline_, lane_.spin,
                            [&] { return written.load(std::memory_order_acquire) >= needed; });
  }
  void Publish(std::atomic<uint64_t>& counter, int ring, int64_t step) {
    counter.store(base_[ring] + static_cast<uint64_t>(step) + 1, std::memory_order_release);
    group_.WakeOthers();
  }
  void Finish(int ring) {
    const uint64_t end = base_[ring] + static_cast<uint64_t>(steps_);
    if (mine(ring).written.load(std::memory_order_relaxed) == end &&
        mine(ring).consumed.load(std::memory_order_relaxed) == end)
      return;
    mine(ring).written.store(end, std::memory_order_release);
    mine(ring).consumed.store(end, std::memory_order_release);
    group_.WakeOthers();
  }

  void Copy(void* to, const void* from, int64_t count) {
    CopyBytes(lane_.thread, to, from, count * element_, together_bytes_);
  }
  static void CopyToSlot(std::byte* slot, const std::byte* from, int64_t bytes) {
    std::memcpy(slot, from, static_cast<size_t>(bytes));
  }

  bool Stage(int64_t step) {
    if (!stages()) return true;
    if (!AwaitFree(kReductionRing, step)) return false;
    const Range range = RangeOf(step);
    switch (call_.kind) {
      case CollectiveKind::kAllGather:
      case CollectiveKind::kBroadcast:
        StageOwn(range, step);
        break;
      case CollectiveKind::kReduceScatter:
      case CollectiveKind::kAllToAll:
        StageBlocks(range, step);
        break;
      default:
        StageParts(range, step);
    }
    Publish(mine(kReductionRing).written, kReductionRing, step);
    return true;
  }
  void StageOwn(Range range, int64_t step) {
    std::byte* const slot = SlotOf(me_, kReductionRing, step);
    const int64_t place = call_.kind == CollectiveKind::kAllGather ? me_ : 0;
    staged_(range.begin, range.end,
            [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
              const std::byte* const from = At(span.send, first * element_);
              if (size_ > 1) CopyToSlot(slot + at * element_, from, count * element_);
              Copy(At(span.receive, (place * span.count + first) * element_), from, count);
            });
  }
  void StageBlocks(Range range, int64_t step) {
    staged_(range.begin, range.end,
            [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
              for (int peer = 0; peer < size_; ++peer) {
                const std::byte* const from = At(span.send, (peer * span.count + first) * element_);
                if (peer != me_) {
                  CopyToSlot(PartFor(me_, peer, step) + at * element_, from, count * element_);
                } else if (call_.kind == CollectiveKind::kAllToAll) {
                  Copy(At(span.receive, (peer * span.count + first) * element_), from, count);
                }
              }
            });
  }
  void StageParts(Range range, int64_t step) {
    staged_(range.begin, range.end,
            [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
              for (int peer = 0; peer < size_; ++peer) {
                if (peer == me_) continue;
                const Range part = PartOf(range, peer);
                const int64_t begin = std::max(range.begin + at, part.begin);
                const int64_t end = std::min(range.begin + at + count, part.end);
                if (begin >= end) continue;
                CopyToSlot(PartFor(me_, peer, step) + (begin - part.begin) * element_,
                           At(span.send, (first + begin - range.begin - at) * element_),
                           (end - begin) * element_);
              }
            });
  }

  bool Read(int64_t step) {
    if (call_.kind == CollectiveKind::kBroadcast) {
      if (me_ == call_.peer) return true;
      if (!AwaitStaged(call_.peer, kReductionRing, step)) return false;
      ReadFrom(call_.peer, step);
    } else if (call_.kind == CollectiveKind::kAllGather ||
               call_.kind == CollectiveKind::kAllToAll) {
      for (int k = 1; k < size_; ++k) {
        const int peer = (me_ + k) % size_;  // every rank begins elsewhere
        if (!AwaitStaged(peer, kReductionRing, step)) return false;
        ReadFrom(peer, step);
      }
    } else {
      if (call_.kind == CollectiveKind::kAllReduce && !AwaitFree(kResultRing, step)) return false;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != me_ && !AwaitStaged(peer, kReductionRing, step)) return false;
      }
      if (call_.kind == CollectiveKind::kReduceScatter) {
        ReduceBlocks(step);
      } else {
        ReducePart(step);
        Publish(mine(kResultRing).written, kResultRing, step);
      }
    }
    Publish(mine(kReductionRing).consumed, kReductionRing, step);
    return true;
  }
  void ReadFrom(int peer, int64_t step) {
    const Range range = RangeOf(step);
    const std::byte* const slot = call_.kind == CollectiveKind::kAllToAll
                                      ? PartFor(peer, me_, step)
                                      : SlotOf(peer, kReductionRing, step);
    const int64_t place = call_.kind == CollectiveKind::kBroadcast ? 0 : peer;
    read_(range.begin, range.end,
          [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
            Copy(At(span.receive, (place * span.count + first) * element_), slot + at * element_,
                 count);
          });
  }
  void ReduceBlocks(int64_t step) {
    const Range range = RangeOf(step);
    read_(range.begin, range.end,
          [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
            for (int peer = 0; peer < size_; ++peer) {
              lane_.inputs[static_cast<size_t>(peer)] =
                  peer == me_ ? At(span.send, (me_ * span.count + first) * element_)
                              : PartFor(peer, me_, step) + at * element_;
            }
            if (call_.partial != nullptr) {
              Reduce(call_.partial->sums + (range.begin + at - call_.partial->begin), count, 0);
            } else {
              Reduce(At(span.receive, first * element_), count, together_bytes_);
            }
          });
  }
  void ReducePart(int64_t step) {
    const Range part = PartOf(RangeOf(step), me_);
    std::byte* const result = SlotOf(me_, kResultRing, step);
    read_(part.begin, part.end,
          [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
            for (int peer = 0; peer < size_; ++peer) {
              lane_.inputs[static_cast<size_t>(peer)] =
                  peer == me_ ? At(span.send, first * element_)
                              : PartFor(peer, me_, step) + at * element_;
            }
            // Stays in the caches: all others read it.
            Reduce(result + at * element_, count, 0);
            Copy(At(span.receive, first * element_), result + at * element_, count);
          });
  }
  void Reduce(void* to, int64_t count, int64_t together_bytes) {
    ebb::Reduce(lane_.thread, ReductionOf(call_, group_.options().reduction_group), lane_.inputs,
                to, count, together_bytes);
  }
  // The others' results of an all-reduced step.
  bool Gather(int64_t step) {
    const Range range = RangeOf(step);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == me_) continue;
      if (!AwaitStaged(peer, kResultRing, step)) return false;
      const Range part = PartOf(range, peer);
      const std::byte* const slot = SlotOf(peer, kResultRing, step);
      gathered_(part.begin, part.end,
                [&](const CollectiveSpan& span, int64_t first, int64_t count, int64_t at) {
                  Copy(At(span.receive, first * element_), slot + at * element_, count);
                });
    }
    Publish(mine(kResultRing).consumed, kResultRing, step);
    return true;
  }

  NodeGroup& group_;
  Lane& lane_;
  const int number_;
  const Collective& call_;
  const WaitPoint::Deadline deadline_;
  const int me_;
  const int size_;
  const int64_t element_;  // bytes
  const int64_t begin_, end_;
  int64_t part_ = 0;      // elements of a slot's part for one rank
  int64_t per_step_ = 0;  // elements of the row
  int64_t steps_ = 0;
  int64_t together_bytes_ = 0;
  uint64_t base_[node::kRings] = {};
  node::Pieces staged_, read_, gathered_;
};

}  // namespace ebb
