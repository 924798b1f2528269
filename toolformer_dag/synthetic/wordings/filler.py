"""Words of the plain sentences around the phenomena."""

from toolformer_dag.synthetic.wordings.word_list import listed

PERSONS = listed(
    "the old baker;a young teacher;my neighbor;the captain;the quiet girl;a tired farmer;our guide;the "
    "gardener;an old friend;the doctor;the musician;the visitor;her brother;the new student;the fisherman;a "
    "stranger;the postman;his aunt;the tall waiter;a lonely painter;the owner of the inn"
)
GROUPS = listed("the whole village;a small dog;the children;the team;the guests;some travellers;the workers;two cats")
VERBS = listed(
    "walked to;looked at;talked about;thought of;left;painted;remembered;found;cleaned;returned to;wrote "
    "about;waited near;dreamed of;passed by;visited;photographed;took care of;sat beside;asked about;stayed "
    "near;forgot;hurried past;sang about;repaired"
)
PLACES = listed(
    "the market;a wooden bridge;the old mill;the garden;a broken clock;the lake;the white house;a long "
    "letter;the library;the station;an open window;the forest;a warm meal;the music hall;the harbor;a blue "
    "door;the hill;the narrow street;an empty room;the school;a heavy chest;the chapel;the wet road;a basket of "
    "fruit;the theater;an iron gate"
)
ADVERBIALS = listed(
    "in the morning;after the rain;without a word;for a long time;with a smile;before dinner;again and again;as "
    "always;on the way home;in the evening;with great care;during the winter;in silence;for no clear reason;at "
    "the same time;with some friends;late at night;in a hurry"
)
CONNECTIVES = listed("Then;Later;Meanwhile;After that;Soon;In the end;Still;Once more;Nobody knows why, but;Of course")
REMARKS = listed(
    "It was a good day;Nothing else happened;The weather stayed fine;Everybody was pleased;That was a "
    "surprise;The music played on;It began to snow;We laughed about it for a while;The coffee was cold by "
    "then;More about this another time"
)
SUBORDINATE = listed("while;because;although;before;after;whenever")
