#include "ebb/runtime/engine/engine.h"
