"""Words of the plain sentences around the phenomena."""

from toolformer_dag.embedded.wordings.word_list import listed

PERSONS = listed(
    "the old baker;a young teacher;my neighbor;the captain;the quiet girl;a tired farmer;our guide;the "
    "gardener;an old friend;the doctor;the musician;the visitor;her brother;the new student;the "
    "fisherman;a stranger;the postman"
)
GROUPS = listed("the whole village;a small dog;the children;the team;the guests;some travellers;the workers")
VERBS = listed(
    "walked to;looked at;talked about;thought of;left;painted;remembered;found;cleaned;returned to;wrote "
    "about;waited near;dreamed of;passed by;visited;photographed;took care of;sat beside;asked "
    "about;stayed near"
)
PLACES = listed(
    "the market;a wooden bridge;the old mill;the garden;a broken clock;the lake;the white house;a long "
    "letter;the library;the station;an open window;the forest;a warm meal;the music hall;the harbor;a "
    "blue door;the hill;the narrow street;an empty room;the school"
)
ADVERBIALS = listed(
    "in the morning;after the rain;without a word;for a long time;with a smile;before dinner;again and "
    "again;as always;on the way home;in the evening;with great care;during the winter;in silence;for no "
    "clear reason;at the same time"
)
CONNECTIVES = listed("Then;Later;Meanwhile;After that;Soon;In the end;Still;Once more")
