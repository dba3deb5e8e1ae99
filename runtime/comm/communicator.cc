#include "ebb/runtime/comm/communicator.h"
