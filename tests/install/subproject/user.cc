#include "ebb/ebb.h"

int Ranks(const ebb::World& world) {
  int of_no_use;  // a warning with the tree's flags, which would make it an error
  return world.size();
}
