#include "ebb/runtime/comm/wait_cycles.h"

#include <algorithm>
#include <utility>

namespace ebb {
namespace {

using What = WaitCycles::What;

constexpr int kUnitShift = 8, kScopesShift = 32, kCallShift = 32;
constexpr int kDepthMax = 2;  // an evaluation in a step
constexpr uint64_t kUnits = (uint64_t{1} << (kScopesShift - kUnitShift)) - 1;
// Sent to other hosts: enough to name the first difference where a rank waits in its next scopes.
constexpr uint64_t kSent = 16;

uint64_t Word(const What& what) {
  return static_cast<uint64_t>(what.kind) |
         (static_cast<uint64_t>(what.unit + 1) & kUnits) << kUnitShift |
         static_cast<uint64_t>(what.scopes) << kScopesShift;
}

What Unword(uint64_t word) {
  return {.kind = static_cast<CallKind>(word),
          .unit = static_cast<int>(word >> kUnitShift & kUnits) - 1,
          .scopes = static_cast<uint32_t>(word >> kScopesShift)};
}

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return hash ^ hash >> 31;
}

uint64_t HashOf(std::string_view text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

constexpr int kRankBits = 64;
uint64_t Bit(int rank) {
  return uint64_t{1} << (rank % kRankBits);
}

uint64_t CallOf(uint64_t place) {
  return place >> kCallShift;
}

}  // namespace

WaitCycles::WaitCycles(int rank, std::vector<RankLog*> logs, Different different)
    : rank_(rank),
      logs_(std::move(logs)),
      own_(logs_.empty() ? std::make_unique<RankLog>() : nullptr),
      different_(std::move(different)) {
  if (own_ == nullptr) return;
  logs_.resize(static_cast<size_t>(rank) + 1);
  logs_.back() = own_.get();
}

void WaitCycles::AddEngine(int engine, uint64_t call) {
  const int slot = engine % RankLog::kEngines;
  RankLog::Engine& log = Mine().engines[slot];
  log.number.store(0);
  log.first.store(log.count.load());
  log.is_void.store(0);
  log.errors.store(Mine().errors.load());
  writers_[slot] = {};
  made_at_[slot] = call;
  log.number.store(static_cast<uint32_t>(engine) + 1);
}

void WaitCycles::Note(int engine, uint64_t call, What what) {
  if (engine < 0) return;
  RankLog::Engine& log = Mine().engines[engine % RankLog::kEngines];
  if (log.number.load(std::memory_order_relaxed) != static_cast<uint32_t>(engine) + 1) return;
  Writer& writer = writers_[engine % RankLog::kEngines];
  const bool begins = Begins(what.kind), drops = what.kind == CallKind::kDrop,
             ends = Finishes(what.kind) || drops;
  if (writer.depth == 0) {
    if (IsWithin(what.kind) || ends) return;
    writer = {};
    writer.call = call - made_at_[engine % RankLog::kEngines];
    log.is_void.store(0, std::memory_order_relaxed);
  } else {
    ++writer.position;
  }
  if (begins && writer.depth == kDepthMax) return log.is_void.store(1);
  if (begins) writer.scopes[++writer.depth] = 0;
  if (IsScope(what.kind)) ++writer.scopes[writer.depth];
  what.scopes = writer.scopes[writer.depth];
  if (ends) --writer.depth;
  const uint64_t word = Word(what);
  writer.hash = Mix(writer.hash, word);
  if (drops && writer.depth > 0) log.is_void.store(1);
  if (log.is_void.load(std::memory_order_relaxed) != 0) return;
  const uint64_t number = log.count.load(std::memory_order_relaxed);
  RankLog::Entry& entry = log.entries[number % RankLog::kKept];
  entry.place.store(writer.call << kCallShift | writer.position, std::memory_order_release);
  entry.what.store(word, std::memory_order_release);
  entry.hash.store(writer.hash, std::memory_order_release);
  log.count.store(number + 1, std::memory_order_release);
}

void WaitCycles::NoteError(uint32_t errors) {
  for (RankLog::Engine& log : Mine().engines) {
    log.is_void.store(1);
    log.first.store(log.count.load());
  }
  Mine().errors.store(errors, std::memory_order_seq_cst);
}

// A rank writes an entry before it counts it, so one more may be under way in the oldest's memory.
WaitCycles::Copy WaitCycles::Read(const RankLog& log, uint64_t newest) {
  Copy copy;
  copy.errors = log.errors.load(std::memory_order_seq_cst);
  for (const RankLog::Engine& engine : log.engines) {
    const uint32_t number = engine.number.load(), errors = copy.errors - engine.errors.load();
    const uint64_t count = engine.count.load(std::memory_order_acquire);
    if (number == 0) continue;
    const uint64_t from = std::max(engine.first.load(), count - std::min(count, newest));
    std::vector<Entry> entries;
    for (uint64_t i = from; i < count; ++i) {
      const RankLog::Entry& entry = engine.entries[i % RankLog::kKept];
      entries.push_back({.place = entry.place.load(std::memory_order_acquire),
                         .what = entry.what.load(std::memory_order_acquire),
                         .hash = entry.hash.load(std::memory_order_acquire)});
    }
    const uint64_t now = engine.count.load(std::memory_order_seq_cst);
    const uint64_t lost = now + 1 > from + RankLog::kKept ? now + 1 - from - RankLog::kKept : 0;
    entries.erase(entries.begin(), entries.begin() + static_cast<ptrdiff_t>(
                                                         std::min<uint64_t>(lost, entries.size())));
    if (engine.number.load() != number) continue;
    copy.engines.push_back(
        {.number = static_cast<int>(number) - 1, .errors = errors, .entries = std::move(entries)});
  }
  copy.lanes = ReadLanes(log);
  return copy;
}

std::vector<WaitCycles::LaneState> WaitCycles::ReadLanes(const RankLog& log) {
  std::vector<LaneState> lanes;
  for (const RankLog::Lane& lane : log.lanes) {
    const uint64_t id = lane.id.load();
    if (id == 0) continue;
    lanes.push_back({.id = id,
                     .enqueued = lane.enqueued.load(std::memory_order_seq_cst),
                     .waits = lane.waits.load(std::memory_order_seq_cst),
                     .absent = lane.absent.load()});
  }
  return lanes;
}

bool WaitCycles::WaitsInVain(std::span<const LaneState> lanes, int other,
                             std::span<const LaneState> of_other) {
  return std::any_of(lanes.begin(), lanes.end(), [&](const LaneState& lane) {
    if (lane.waits == 0 || (lane.absent & Bit(other)) == 0) return false;
    return std::any_of(of_other.begin(), of_other.end(), [&](const LaneState& theirs) {
      return theirs.id == lane.id && theirs.enqueued < lane.waits;
    });
  });
}

absl::Status WaitCycles::Compare(const Copy& mine, int other, const Copy& theirs) const {
  for (const auto& [engine, errors, entries] : mine.engines) {
    const auto found = std::find_if(
        theirs.engines.begin(), theirs.engines.end(),
        [&](const OfEngine& of) { return of.number == engine && of.errors == errors; });
    if (found == theirs.engines.end()) continue;
    const std::vector<Entry>& others = found->entries;
    const auto dropped = [](const std::vector<Entry>& of, uint64_t call) {
      return std::any_of(of.begin(), of.end(), [&](const Entry& entry) {
        return CallOf(entry.place) == call && Unword(entry.what).kind == CallKind::kDrop;
      });
    };
    auto their = others.begin();
    for (const Entry& my : entries) {
      while (their != others.end() && their->place < my.place) ++their;
      if (their == others.end()) break;
      if (their->place != my.place || their->hash == my.hash) continue;
      if (dropped(entries, CallOf(my.place)) && dropped(others, CallOf(my.place))) continue;
      const What what = Unword(my.what), its = Unword(their->what);
      return rank_ < other ? different_(engine, rank_, what, other, its)
                           : different_(engine, other, its, rank_, what);
    }
  }
  return absl::OkStatus();
}

absl::Status WaitCycles::LookAt(std::span<const int> absent) {
  const auto log_of = [&](int rank) {
    const auto place = static_cast<size_t>(rank);
    return rank != rank_ && place < logs_.size() ? logs_[place] : nullptr;
  };
  const auto compare = [&](int other, const RankLog& theirs) {
    const Copy copy = Read(theirs, RankLog::kKept), mine = Read(Mine(), RankLog::kKept);
    // An error since then has told the ranks.
    if (theirs.errors.load(std::memory_order_seq_cst) != copy.errors) return absl::OkStatus();
    return Compare(mine, other, copy);
  };
  // The other one has found the difference, and its own wait has ended.
  if (const uint32_t apart = Mine().apart.exchange(0); apart != 0) {
    const int other = static_cast<int>(apart) - 1;
    if (const RankLog* const theirs = log_of(other)) {
      if (absl::Status differ = compare(other, *theirs); !differ.ok()) return differ;
    }
  }
  for (const int other : absent) {
    RankLog* const theirs = log_of(other);
    if (theirs == nullptr) continue;
    const std::vector<LaneState> mine = ReadLanes(Mine()), lanes = ReadLanes(*theirs);
    if (!WaitsInVain(mine, other, lanes) || !WaitsInVain(lanes, rank_, mine)) continue;
    if (absl::Status differ = compare(other, *theirs); !differ.ok()) {
      theirs->apart.store(static_cast<uint32_t>(rank_) + 1);
      return differ;
    }
  }
  return absl::OkStatus();
}

std::vector<int> WaitCycles::AwaitedBy(int rank) const {
  const auto place = static_cast<size_t>(rank);
  // Among more ranks a bit stands for several.
  if (place >= logs_.size() || logs_[place] == nullptr || logs_.size() > kRankBits) return {};
  uint64_t bits = 0;
  for (const LaneState& lane : ReadLanes(*logs_[place]))
    if (lane.waits != 0) bits |= lane.absent;
  std::vector<int> ranks;
  for (int of = 0; of < static_cast<int>(logs_.size()); ++of)
    if ((bits & Bit(of)) != 0) ranks.push_back(of);
  return ranks;
}

void WaitCycles::Pack(Packer& packer) const {
  const Copy mine = Read(Mine(), kSent);
  packer.Add(mine.engines.size());
  for (const auto& [engine, errors, entries] : mine.engines) {
    packer.Add(engine, errors, entries.size());
    for (const Entry& entry : entries) packer.Add(entry.place, entry.what, entry.hash);
  }
  packer.Add(mine.lanes.size());
  for (const LaneState& lane : mine.lanes)
    packer.Add(lane.id, lane.enqueued, lane.waits, lane.absent);
}

absl::Status WaitCycles::Receive(int rank, Unpacker& unpacker) const {
  const auto for_each = [&](auto read) {
    for (uint64_t left = unpacker.Number(); left > 0 && unpacker.ok(); --left) read();
  };
  Copy theirs;
  for_each([&] {
    OfEngine& of = theirs.engines.emplace_back();
    unpacker.Read(of.number, of.errors);
    for_each([&] {
      Entry& entry = of.entries.emplace_back();
      unpacker.Read(entry.place, entry.what, entry.hash);
    });
  });
  for_each([&] {
    LaneState& lane = theirs.lanes.emplace_back();
    unpacker.Read(lane.id, lane.enqueued, lane.waits, lane.absent);
  });
  const Copy mine = Read(Mine(), RankLog::kKept);
  if (!unpacker.ok() || !WaitsInVain(mine.lanes, rank, theirs.lanes) ||
      !WaitsInVain(theirs.lanes, rank_, mine.lanes))
    return absl::OkStatus();
  return Compare(mine, rank, theirs);
}

WaitCycles::Lane::Lane(WaitCycles& cycles, std::string_view id) : cycles_(cycles) {
  const std::scoped_lock lock(cycles_.lanes_mutex_);
  for (RankLog::Lane& lane : cycles_.Mine().lanes) {
    if (lane.id.load() != 0) continue;
    lane_ = &lane;
    lane.enqueued.store(0);
    lane.waits.store(0);
    lane.id.store(HashOf(id) | 1);
    return;
  }
}

WaitCycles::Lane::~Lane() {
  if (lane_ != nullptr) lane_->id.store(0);
}

void WaitCycles::Lane::Enqueued(uint64_t collectives) {
  if (lane_ != nullptr) lane_->enqueued.store(collectives, std::memory_order_release);
}

void WaitCycles::Lane::End() {
  running_ = 0;
  if (std::exchange(waits_, false)) lane_->waits.store(0, std::memory_order_seq_cst);
}

absl::Status WaitCycles::Lane::WaitsIn(uint64_t collective, std::span<const int> absent) {
  if (lane_ == nullptr || collective == 0) return absl::OkStatus();
  uint64_t bits = 0;
  for (const int rank : absent) bits |= Bit(rank);
  lane_->absent.store(bits);
  // The second of two ranks that wait for each other sees that the first one does.
  lane_->waits.store(collective, std::memory_order_seq_cst);
  waits_ = true;
  return cycles_.LookAt(absent);
}

}  // namespace ebb
