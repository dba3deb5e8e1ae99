// Functions of the CUDA driver, which is not linked, as programs have to start where there is none.
#pragma once

namespace ebb {

// Null: there is no driver, or it has no such function of CUDA 12.0.
void* DriverFunction(const char* name);

}  // namespace ebb
