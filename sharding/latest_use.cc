#include "ebb/sharding/latest_use.h"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace ebb::sharding {

void LatestUse::Cut(int64_t at) {
  const auto after = pieces_.lower_bound(at);
  if (after == pieces_.begin()) return;
  Piece& piece = std::prev(after)->second;
  if (piece.end <= at) return;
  pieces_.emplace_hint(after, at, piece);
  piece.end = at;
}

void LatestUse::Use(int64_t begin, int64_t end, int use) {
  assert(use > last_);
  last_ = use;
  if (begin >= end) return;
  Cut(begin);
  Cut(end);
  const auto after = pieces_.erase(pieces_.lower_bound(begin), pieces_.lower_bound(end));
  pieces_.emplace_hint(after, begin, Piece{.end = end, .use = use});
}

int LatestUse::Latest(int64_t begin, int64_t end) const {
  int latest = -1;
  if (begin >= end) return latest;
  auto piece = pieces_.lower_bound(begin);
  if (piece != pieces_.begin() && std::prev(piece)->second.end > begin) --piece;
  for (; piece != pieces_.end() && piece->first < end; ++piece)
    latest = std::max(latest, piece->second.use);
  return latest;
}

}  // namespace ebb::sharding
