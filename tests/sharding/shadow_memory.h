// The pools of all tiers as a model of memory that knows the contents of each byte, its writer, and
// its readers since. It complains about an access outside of its pool, about other contents than
// expected, and about an access that is not ordered with an earlier, conflicting one. If it does
// not complain, every order that the streams allow has the result of the order of issue.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ebb/sharding/plan.h"
#include "happens_before.h"

namespace ebb::sharding {

// The content of some bytes; the numbers say which one of its kind.
struct Content {
  enum Kind : uint8_t {
    kNothing,
    kParameter,         // unit, version
    kFrozen,            // unit
    kMaster,            // unit, version
    kOptimizerState,    // unit, version, which state
    kWholeGradient,     // visit, step, round; or rounds so far where a step's are summed
    kCastGradient,      // as above
    kGroupSlice,        // as above: the sum of one shard group
    kSummedSlice,       // as above: of all of them, not rounded yet
    kReducedSlice,      // as above
    kGradientShard,     // unit, step, contributions so far; a sum over tensor is the last
    kGatheredGradient,  // unit, step
    kOutput,            // visit, walk
    kOutputGradient,    // visit, walk
    kNorm,
    kSums,
    kExchanged,  // step
    kOptimizerGradient,
    kParameterNorms,  // step: what sub-groups so far have summed
    kNormRecords,     // step
    kDirection,       // unit, step
    kMatrices,        // unit, step, whether they are orthogonal
    kOrthogonal,      // unit, step: the direction that has come back
  };
  Kind kind = kNothing;
  int a = 0, b = 0, c = 0;
  int64_t first = 0;  // the first byte of it, if it is moved or used in pieces
  friend bool operator==(const Content&, const Content&) = default;
};
std::string ToString(const Content& content);

struct Range {
  StateClass pool{};
  int64_t begin = 0, bytes = 0;
  Tier tier = Tier::kDevice;
};

// Bytes that stand for ControlCells, a byte each: as the workspace of the host, which has none.
inline constexpr StateClass kControlBytes = StateClass::kWorkspace;

class ShadowMemory {
 public:
  // Two files: pool kParameter of kNvme, and pool kMaster, which holds all else.
  ShadowMemory(const HappensBefore& order, const Table& table);

  void Read(int thing, const Range& range, const Content& expected);
  void Write(int thing, const Range& range, const Content& content);
  // Any contents, also padding.
  void Copy(int thing, const Range& from, const Range& to);

  // The first complaint; empty while there is none. `thing`: the one that made the access.
  const std::string& complaint() const { return complaint_; }
  int thing() const { return thing_; }

 private:
  struct Segment {
    int64_t end = 0;
    Content content;
    int writer = HappensBefore::kStart;
    std::array<int, kLines> readers;  // the last one on each line since it was written
  };
  using Segments = std::map<int64_t, Segment>;  // by first byte; they tile the pool
  struct Pool {
    int64_t bytes = 0;
    Segments segments;
  };

  Pool& PoolOf(const Range& range) {
    return pools_[static_cast<size_t>(range.tier)][static_cast<size_t>(range.pool)];
  }
  void NoteRead(int thing, const Range& range, Segment& segment);
  void CheckOverwrite(int thing, const Range& range, const Segment& segment);

  // The segments of exactly this range, first and past the last.
  std::pair<Segments::iterator, Segments::iterator> Cut(const Range& range);
  bool Check(int thing, const Range& range);
  void Complain(int thing, const Range& range, const std::string& what);

  const HappensBefore& order_;
  std::array<std::array<Pool, kStateClasses>, kTiers> pools_;
  std::string complaint_;
  int thing_ = HappensBefore::kStart;
};

}  // namespace ebb::sharding
