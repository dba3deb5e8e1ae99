// The arguments of io_bench.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ebb::bench {

// Fewer bytes have fewer requests than a queue holds, so the time of one request would be measured.
inline constexpr int64_t kBytesMin = int64_t{1} << 20;

// The exit code for an impossible command line.
inline constexpr int kUsageError = 2;

struct Arguments {
  std::string path;
  int64_t bytes = 0;  // of each file; 0: chosen
  double seconds = 30;
  int64_t block_bytes = 0;  // 0: found
  int64_t depth = 0;
  int64_t files = 0;
  bool json_only = false;
};

// Nothing: go on with `arguments`. Otherwise the exit code; the message has been printed.
std::optional<int> Parse(int argc, char** argv, Arguments& arguments);

}  // namespace ebb::bench
