// The lists of a plan: many, small, and constant once they are made. They lie end to end in a few
// blocks. A list that every round repeats is kept once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/types/span.h"

namespace ebb::sharding {

// T has == and AbslHashValue where KeepOnce is used.
template <class T>
class Lists {
 public:
  Lists() = default;
  Lists(const Lists&) = delete;  // spans that were given out would not lead into the copy
  Lists& operator=(const Lists&) = delete;

  // A copy of `list`. The copy stays where it is as long as this lives.
  std::span<const T> Keep(std::span<const T> list) {
    if (list.empty()) return {};
    if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < list.size())
      blocks_.emplace_back().reserve(std::max(list.size(), NextBlock()));
    std::vector<T>& block = blocks_.back();
    const size_t at = block.size();
    block.insert(block.end(), list.begin(), list.end());
    return std::span<const T>(block).subspan(at);
  }

  // A copy of `list`, which equal lists share.
  std::span<const T> KeepOnce(std::span<const T> list) {
    return *kept_.lazy_emplace(list, [&](const auto& construct) { construct(Keep(list)); });
  }

  // No list is added after this.
  void Close() { absl::flat_hash_set<std::span<const T>, Hash, Equal>().swap(kept_); }

  void Clear() {
    Close();
    blocks_.clear();
  }

  int64_t bytes() const {
    size_t elements = 0;
    for (const std::vector<T>& block : blocks_) elements += block.capacity();
    return static_cast<int64_t>(elements * sizeof(T));
  }

 private:
  // All elements count: thousands of lists have the same ends.
  struct Hash {
    size_t operator()(std::span<const T> all) const { return absl::HashOf(absl::MakeSpan(all)); }
  };
  struct Equal {
    bool operator()(std::span<const T> a, std::span<const T> b) const {
      return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }
  };
  // Elements of the next block: as many as there are so far, within limits.
  size_t NextBlock() const {
    return blocks_.empty() ? 32 : std::min<size_t>(2 * blocks_.back().capacity(), 1024);
  }
  std::vector<std::vector<T>> blocks_;
  absl::flat_hash_set<std::span<const T>, Hash, Equal> kept_;
};

}  // namespace ebb::sharding
