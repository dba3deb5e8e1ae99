#include "ebb/runtime/trace/timeline.h"
