#include "ebb/sharding/model.h"
