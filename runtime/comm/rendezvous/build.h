// Which build of Ebb this is, as far as ranks that are to share memory have to be of the same.
#pragma once

#include <string>

namespace ebb {

// "Ebb 0.1.0 (shared memory 5a0f...)": the version, and a number that differs where the structures
// that ranks share are of other sizes.
std::string ThisBuild();

}  // namespace ebb
