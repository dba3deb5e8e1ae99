// What a rank tells another outside of its calls, as one message.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"

namespace ebb {

struct Notice {
  // kBroken: no more communicators can be created out of the group. kCalls: the sender's, as CallOrder
  // packs them.
  enum class Kind : int32_t { kFailure, kBroken, kFarewell, kCalls };
  static constexpr int kTextBytesMax = 2040;

  Kind kind = Kind::kFailure;
  int32_t group = 0;   // 0: the world
  int32_t code = 0;    // of a Status
  uint64_t calls = 0;  // of a farewell: letters that the receiver has been sent before
  uint64_t bytes = 0;  // of `text`, of kCalls
  uint64_t proposals = 0;
  char text[kTextBytesMax] = {};  // longer ones are cut

  static Notice Of(Kind kind, int group, const absl::Status& status) {
    Notice notice = {.kind = kind, .group = group, .code = static_cast<int32_t>(status.code())};
    const size_t bytes = std::min<size_t>(status.message().size(), kTextBytesMax - 1);
    std::copy_n(status.message().data(), bytes, notice.text);
    return notice;
  }
};

}  // namespace ebb
