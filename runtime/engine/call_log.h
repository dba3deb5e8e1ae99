// How a call of all ranks was begun, and the scopes opened in it, as numbers. If ranks differ, the
// call is an error of all of them.
#pragma once

#include <cstdint>
#include <vector>

namespace ebb {

struct CallLog {
  std::vector<int64_t> entries;  // how it was begun (kBegunEntries), then scopes opened, as codes
  uint64_t hash = 0;             // of how it was begun

  // Reset in place, so that a step allocates nothing.
  void Clear() {
    entries.clear();
    hash = 0;
  }
  void Begin(int64_t code) {
    entries.push_back(code);
    hash = (hash ^ static_cast<uint64_t>(code + 1)) * 0x100000001b3ull;
  }
};

}  // namespace ebb
