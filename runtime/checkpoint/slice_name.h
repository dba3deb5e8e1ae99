// The names of slices of a parameter in a checkpoint: "master/block0.weight@4096:8192" are elements
// 4096 to 8191 of the flattened parameter block0.weight. The class is "master" for trainable
// parameters, "parameter" for frozen ones, and for other arrays the optimizer state's own name
// ("exp_avg").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ebb {

inline constexpr std::string_view kMasterClass = "master", kParameterClass = "parameter";

struct SliceName {
  std::string of;         // class
  std::string parameter;  // which may hold '/', '@' and ':' itself
  int64_t begin = 0, end = 0;

  friend bool operator==(const SliceName&, const SliceName&) = default;
};

std::string NameOf(const SliceName& slice);
// Nothing: the text is not the name of a slice, or the slice is empty.
std::optional<SliceName> ParseSliceName(std::string_view text);

}  // namespace ebb
