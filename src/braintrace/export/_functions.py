"""Functions that C99 does not have: what a program uses of them stands in its source."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMES = frozenset(("threefry", "erf_inv", "erf_invf", "checksum"))
_BITS = re.compile(r"\bbits_(float|double|u?int\d+_t)_(float|double|u?int\d+_t)\(")

# Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011, with 20 rounds as in JAX.
_THREEFRY = """static uint32_t threefry(
    uint32_t k, uint32_t l, uint32_t a, uint32_t b, int second) {
    static const unsigned char turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t key[3] = {k, l, k ^ l ^ 0x1bd11bdau};
    a += k;
    b += l;
    for (int r = 0; r < 5; r++) {
        for (int i = 0; i < 4; i++) {
            const int turn = turns[4 * (r & 1) + i];
            a += b;
            b = (b << turn | b >> (32 - turn)) ^ a;
        }
        a += key[(r + 1) % 3];
        b += key[(r + 2) % 3] + (uint32_t)r + 1u;
    }
    return second ? b : a;
}"""
# Giles, *Approximating the erfinv function*, 2012: polynomials in w = -log(1 - y^2), as in XLA.
_ERF_INV = """static double erf_inv(double y) {
    static const double near[23] = {
        -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18,
        1.115787767802518096e-17, -1.333171662854620906e-16, 2.0972767875968561637e-17,
        6.6376381343583238325e-15, -4.0545662729752068639e-14, -8.1519341976054721522e-14,
        2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
        1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08,
        4.2347877827932403518e-07, -1.3654692000834678645e-06, -1.3882523362786468719e-05,
        0.0001867342080340571352, -0.00074070253416626697512, -0.0060336708714301490533,
        0.24015818242558961693, 1.6536545626831027356};
    static const double far[19] = {
        2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07,
        1.8239629214389227755e-08, 1.5027403968909827627e-06, -4.013867526981545969e-06,
        2.9234449089955446044e-06, 1.2475304481671778723e-05, -4.7318229009055733981e-05,
        6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
        0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066,
        -0.0037512085075692412107, 0.005370914553590063617, 1.0052589676941592334,
        3.0838856104922207635};
    static const double last[17] = {
        -2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09,
        -3.7894654401267369937e-09, 7.6157012080783393804e-09, -1.4960026627149240478e-08,
        2.9147953450901080826e-08, -6.7711997758452339498e-08, 2.2900482228026654717e-07,
        -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
        7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026,
        1.0103004648645343977, 4.8499064014085844221};
    if (y == 1 || y == -1) return y * INFINITY;
    const double w = -log1p(-y * y);
    const double *c = w < 6.25 ? near : w < 16 ? far : last;
    const double z = w < 6.25 ? w - 3.125 : sqrt(w) - (w < 16 ? 3.25 : 5.0);
    const int n = w < 6.25 ? 23 : w < 16 ? 19 : 17;
    double p = c[0];
    for (int i = 1; i < n; i++) p = p * z + c[i];
    return p * y;
}"""
_ERF_INVF = """static float erf_invf(float y) {
    static const float near[9] = {
        2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f,
        -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f};
    static const float far[9] = {
        -0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f,
        -0.0076224613f, 0.00943887047f, 1.00167406f, 2.83297682f};
    if (y == 1 || y == -1) return y * INFINITY;
    const float w = -log1pf(-y * y);
    const float *c = w < 5 ? near : far;
    const float z = w < 5 ? w - 2.5f : sqrtf(w) - 3;
    float p = c[0];
    for (int i = 1; i < 9; i++) p = p * z + c[i];
    return p * y;
}"""
_TEXTS = {"threefry": _THREEFRY, "erf_inv": _ERF_INV, "erf_invf": _ERF_INVF}


def functions_in(lines: Iterable[str]) -> list[str]:
    """The functions that some lines call."""
    text = "\n".join(lines)
    found = [body for name, body in _TEXTS.items() if re.search(rf"\b{name}\(", text)]
    return found + [_bits(*pair) for pair in dict.fromkeys(_BITS.findall(text))]


def _bits(source: str, target: str) -> str:
    """The bits of a number as one of another type."""
    return f"""static {target} bits_{source}_{target}({source} a) {{
    {target} b;
    memcpy(&b, &a, sizeof b);
    return b;
}}"""
