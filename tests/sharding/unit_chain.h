// The plainest model: units of one parameter each, of these many elements, visited in order.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

inline ModelSpec UnitChain(const std::vector<int64_t>& sizes, int64_t output_bytes = 0) {
  ModelSpec model;
  for (int64_t size : sizes) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", model.units.size()));
    model.Add(
        unit,
        {.name = absl::StrCat("p", model.parameters.size()), .shape = {size}, .init = Constant(0)});
    model.forward.push_back({.unit = unit, .output_bytes = output_bytes});
  }
  return model;
}

}  // namespace ebb::sharding
