#include "ebb/runtime/config/config.h"
