// Included before every file of the kernels. A program linked here asks for the newest version of
// each of glibc's functions, and then runs on no older glibc. torch's wheels run from 2.28 on, and
// so should ours: of the functions of double that became faster in 2.29 this asks for the first
// version there was, which has the same results. release/wheel.sh tells when another function is
// too new.
#pragma once

#if __has_include(<gnu/libc-version.h>) && defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
#elif __has_include(<gnu/libc-version.h>) && defined(__aarch64__)
__asm__(".symver exp,exp@GLIBC_2.17");
__asm__(".symver log,log@GLIBC_2.17");
#endif
