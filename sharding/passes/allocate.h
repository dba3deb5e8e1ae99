// Places of a table's arrays. Reads the rows alone: in each pool first the arrays that share memory
// by lifetime, then the others, end to end.
#pragma once

#include "ebb/sharding/program/table.h"

namespace ebb::sharding {

// Fills in the places of all extents, and the bytes of the pools.
void Allocate(Table& table);

}  // namespace ebb::sharding
