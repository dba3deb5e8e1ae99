#include "ebb/ebb.h"

int Ranks(const ebb::World& world) {
  int of_no_use;  // warns with the tree's flags, and would be an error
  return world.size();
}
