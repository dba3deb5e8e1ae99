// A candidate of io_bench: a way to transfer a file once, with some settings.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/offload/shard_file.h"

namespace ebb::bench {

inline double Median(std::vector<double> values) {
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle),
                   values.end());
  return values[middle];
}

struct Settings {
  AioOptions aio;
  int files = 1;
};
struct Candidate {
  std::string name;
  Settings settings;
  std::function<absl::Status(bool write)> pass;
  std::vector<double> write_rates, read_rates;  // bytes per second

  double write_rate() const { return Median(write_rates); }
  double read_rate() const { return Median(read_rates); }
  double seconds_per_byte() const { return 1 / write_rate() + 1 / read_rate(); }
};

}  // namespace ebb::bench
