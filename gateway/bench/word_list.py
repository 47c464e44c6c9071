"""The words that prompts are made of: short and common, so that most tokenizers have one token for each."""

from __future__ import annotations

from typing import Final

_TEXT: Final = (
    "the of and to in is was for on that with as by at from his it an were are which this be had not "
    "also have one or but their its first they he she all when has been there who more no out up so "
    "after into than only other time can two some over new would about like then what made may these "
    "many most them her him people if where such during years city three being under later through "
    "well part same work before because while known will world day both set own very second until "
    "best between life long home school end use now book name high water small four good old land "
    "form line show each house state since much number back down man found any young group early "
    "place how another large great even game local power family play must way off around north south "
    "east west side five run area team company music film song white black red blue green public open "
    "body air sea river road town hill rock tree fire light night summer winter spring child woman "
    "father mother son friend king law war peace art science history story word letter paper page "
    "food bread milk fish bird horse dog hand head eye face heart mind hope idea plan change move "
    "turn walk stand keep give take make come see look find think know want need help ask tell read "
    "write speak hear learn build grow begin start stop close cut carry bring send pay buy sell win "
    "lose wait watch follow lead hold reach left right next last few less least often always never "
    "once again still yet soon today "
)
WORDS: Final = tuple(_TEXT.split())
