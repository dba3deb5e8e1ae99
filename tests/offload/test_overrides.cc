#include "tests/offload/test_overrides.h"

namespace ebb {

OffloadOverrides& testing::TestOverrides() {
  static OffloadOverrides overrides;
  return overrides;
}

const OffloadOverrides& GivenOverrides() {
  return testing::TestOverrides();
}

}  // namespace ebb
